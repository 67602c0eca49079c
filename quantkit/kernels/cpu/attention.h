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
    int64_t query_stride, key_stride, value_stride; /* between tokens, in elements */
    int64_t query_heads, group, window;
    float scale, softcap;
    int type;
} attention;

/* Attend for one key head of one sequence, then store the keys and values of its new tokens. `start` is the row of the
   first new token. Calls for different heads or sequences may run at the same time. Returns 0, or 1 if out of memory. */
int kv_attend_head(const attention *a, int64_t sequence, int64_t start, int64_t head);
