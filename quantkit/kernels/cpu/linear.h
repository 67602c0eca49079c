/* Layout of a weight (N, K) for the native linear kernels, and of the inputs that they share.

   A panel is 64 outputs: four blocks of 16, with one output per lane of a vector. So nothing is ever summed across
   lanes, and scales are vectors. Zeros pad the outputs to whole panels, and the inputs to whole pairs (quads for int8).
   A panel is stored in the order in which it is read. Layout of one pair of inputs (e, o), and its bytes, by storage:

       QK_BF16  [block 4][lane 16][e, o]  16-bit words                                            256 bytes
       QK_F32   [e, o][block 4][lane 16]  floats                                                  512
       QK_F16   as QK_F32, in fp16, for inputs in fp32                                            256
       QK_W4    [lane 16][e, o] words; nibble b of a word is code + 8 of block b                   64
       QK_W8    [half 2][lane 16][e, o] words; byte b of a word is the code of block 2 half + b   128
       QK_FP8   as QK_W8, codes in e4m3                                                           128
       QK_H8    [half 2][quarter 4][block 2][lane 4][e, o] bytes; an int8 code c is stored as     128
                sign | m, where c + 1/2 = +-(m + 1/2). For inputs in bf16, whose 8 significant bits hold c + 1/2
       QK_U8    for a quad of inputs: [block 4][lane 16][4] bytes, code + QK_OFFSET                 256

   Scales and zeros are [panel][group][64]. */
#pragma once
#include "product.h"

/* Whether this library has linear_int16.h. */
#if !QK_AVX512 && defined(__x86_64__)
#define QK_INT16 1
#else
#define QK_INT16 0
#endif

enum { QK_BF16, QK_F32, QK_W4, QK_W8, QK_FP8, QK_F16, QK_H8, QK_U8 };
/* Machines without linear_int16.h, and weights other than QK_W4 and QK_W8, treat QK_TO_INT16 as QK_AS_IT_IS. */
enum { QK_AS_IT_IS, QK_TO_INT8, QK_TO_FP8, QK_TO_INT16 };
enum { QK_SCALE_F32, QK_SCALE_BF16, QK_SCALE_F16 };

typedef struct QkLinear {
    const uint8_t *codes;
    const void *scale;    /* NULL: the codes are the values */
    const void *zero;     /* int8 or float; NULL: symmetric */
    const float *bias;    /* [panel][64]; NULL: none */
    int64_t n, k, group;  /* group: inputs per scale */
    int32_t storage, scale_kind, zero_is_float; /* scales are floats, bf16 or fp16: QK_SCALE_.. */
} QkLinear;

enum { QK_PANEL = 64, QK_ROWS = 256 };  /* outputs per panel; tokens whose results of a panel are kept at once */

/* What is added to the codes of QK_U8: x86 multiplies unsigned by signed bytes, NEON signed by signed bytes. */
#ifdef __aarch64__
enum { QK_OFFSET = 0 };
#else
enum { QK_OFFSET = 128 };
#endif

/* Without this pragma, GCC keeps the sums in memory before and after a loop. */
#define UNROLL _Pragma("GCC unroll 8")

/* Below this many products, a second thread costs more than it saves. */
#define QK_PARALLEL_FROM (1 << 18)

/* Quantize a row of k inputs, and return its scale. Codes are stored as int8 or as bf16 numbers; zeros pad them to
   length `padded`. */
float qk_quantize_int8(const void *x, int is_bf16, int64_t k, int64_t padded, int8_t *codes);
float qk_quantize_bf16(const void *x, int is_bf16, int64_t k, int64_t padded, int activation, uint16_t *codes);

/* Write the first `width` of 64 results of one token: value * row_scale + bias. */
QK_INLINE void qk_store_panel(const float *value, float row_scale, const float *bias, void *out, int64_t width,
                              int is_bf16) {
    for (int b = 0; b < 4 && 16 * b < width; b++) {
        __mmask16 mask = width - 16 * b >= 16 ? 0xffff : (__mmask16)((1u << (width - 16 * b)) - 1);
        __m512 v = _mm512_mul_ps(_mm512_loadu_ps(value + 16 * b), _mm512_set1_ps(row_scale));
        if (bias) v = _mm512_add_ps(v, _mm512_loadu_ps(bias + 16 * b));
        if (is_bf16) _mm256_mask_storeu_epi16((uint16_t *)out + 16 * b, mask, (__m256i)_mm512_cvtneps_pbh(v));
        else _mm512_mask_storeu_ps((float *)out + 16 * b, mask, v);
    }
}

QK_INLINE __m512 qk_load_scale(const QkLinear *linear, int64_t index) {
    const uint16_t *half = (const uint16_t *)linear->scale + index;
    if (linear->scale_kind == QK_SCALE_BF16) return qk_load_bf16(half);
    if (linear->scale_kind == QK_SCALE_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
    return _mm512_loadu_ps((const float *)linear->scale + index);
}

/* Write the results of a panel for `tokens` tokens from `token` on. row_scale: one per token; NULL: all are 1. */
QK_INLINE void qk_store_tokens(const QkProduct *product, int64_t panel, int64_t token, int64_t tokens,
                               const float *values, const float *row_scale) {
    const QkLinear *linear = product->linear;
    int64_t width = qk_min(QK_PANEL, linear->n - panel * QK_PANEL);
    for (int64_t m = 0; m < tokens; m++) {
        int64_t at = (token + m) * product->stride + panel * QK_PANEL;
        qk_store_panel(values + QK_PANEL * m, row_scale ? row_scale[token + m] : 1.f,
                       linear->bias ? linear->bias + panel * QK_PANEL : NULL,
                       (uint8_t *)product->out + at * (product->is_bf16 ? 2 : 4), width, product->is_bf16);
    }
}

QK_INLINE int64_t qk_panels(const QkProduct *product) { return (product->linear->n + QK_PANEL - 1) / QK_PANEL; }

/* Return the number of threads for a product: 1 if the product is small or has fewer panels than threads. */
QK_INLINE int qk_threads(const QkProduct *product, int threads) {
    int64_t products = product->tokens * product->linear->n * product->linear->k;
    return threads > qk_panels(product) || products < QK_PARALLEL_FROM ? 1 : threads;
}

/* Call `run` for all panels, divided among the threads. Returns 0, or 1 if out of memory. */
#define QK_RUN_PANELS(run, job, threads) \
    int64_t all_panels = qk_panels((job)->product); \
    if ((threads) <= 1) return run(job, (QkRange){0, all_panels}); \
    int failed = 0; \
    _Pragma("omp parallel for num_threads(threads) schedule(static, 1) reduction(| : failed)") \
    for (int t = 0; t < (threads); t++) failed |= run(job, qk_share(all_panels, t, threads)); \
    return failed;
