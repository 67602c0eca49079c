/* One thread's share of a product with a weight of linear.h, for whoever is in a parallel region already. */
#pragma once
#include "quantkit.h"

typedef struct QkLinear QkLinear;

/* x: (tokens, k) dense; out: (tokens, n), rows `stride` elements apart; both bf16 or both float. */
typedef struct {
    const QkLinear *linear;
    const void *x;
    void *out;
    int64_t stride, tokens;
    int is_bf16, activation; /* QK_TO_..: inputs are rounded to it */
} QkProduct;

/* One thread's panels of a product, inside a parallel region; each thread prepares the inputs for itself. The second is for
   QK_U8. Return 0; 1 when memory is out. */
int qk_linear_share(const QkProduct *product, int thread, int threads);
int qk_linear_int8_share(const QkProduct *product, int thread, int threads);
