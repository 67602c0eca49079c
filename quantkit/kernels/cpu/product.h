/* One thread's share of a product with a weight of linear.h, for callers inside a parallel region. */
#pragma once
#include "quantkit.h"

typedef struct QkLinear QkLinear;

/* x: (tokens, k) dense; out: (tokens, n), rows `stride` elements apart; both bf16 or both float. */
typedef struct {
    const QkLinear *linear;
    const void *x;
    void *out;
    int64_t stride, tokens;
    int is_bf16, activation; /* activation: type that inputs are rounded to, QK_TO_.. */
} QkProduct;

/* Multiply one thread's panels of a product, inside a parallel region. Each thread prepares the inputs for itself. The
   second function is for QK_U8. Both return 0, or 1 if out of memory. */
int qk_linear_share(const QkProduct *product, int thread, int threads);
int qk_linear_int8_share(const QkProduct *product, int thread, int threads);
