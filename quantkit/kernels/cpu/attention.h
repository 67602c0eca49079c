/* One layer's attention over the pages of a step's sequences. */
#pragma once
#include "kv.h"

typedef struct {
    double scale, softcap; /* softcap 0: none */
    int64_t window;        /* 0: none */
} attention_options;

typedef struct {
    const kv_layer *layer;
    const kv_batch *batch;
    const uint8_t *query, *key, *value;
    uint8_t *out;
    int64_t query_stride, key_stride, value_stride; /* from token to token, in elements */
    int64_t query_heads, group, window;
    float scale, softcap;
    int type;
} attention;

/* One key head of one sequence in a batch of one new token each: attends, then stores the token's key and value. Calls for
   different heads or sequences may run at the same time. Returns 0, or 1 when memory is out. */
int kv_attend_token(const attention *a, int64_t sequence, int64_t head);
