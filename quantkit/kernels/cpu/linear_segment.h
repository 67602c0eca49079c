/* The innermost loops: one panel (64 outputs) times up to six tokens, over a run of input pairs that share a scale.

   Only linear.c includes this file. The order of summation does not depend on the number of tokens, so a token's result
   does not depend on what else is in the batch. */
#pragma once
#include "linear.h"

enum { MAX_TOKENS = 6 };

static const int64_t PAIR_BYTES[] = {[QK_BF16] = 256, [QK_F32] = 512, [QK_W4] = 64, [QK_W8] = 128,
                                     [QK_FP8] = 128, [QK_F16] = 256, [QK_H8] = 128};

/* Factors on the sums of one panel: main += scale * (sum - zero * sum of inputs). */
typedef struct {
    __m512 scale[4], zero[4];
    const float *inputs; /* sums of the inputs of each token; NULL: no zero points */
    const float *units;  /* value of 1 in the int16 inputs of each token */
    int64_t stride;      /* between tokens in `inputs` and `units` */
    int dense;           /* no scales: main += sum */
    int read_ahead;      /* prefetch the next run, while this run is used for several blocks of tokens */
} Factors;

/* main[token][64] += factors * (w * x) over `pairs` pairs; x has `stride` elements per token. */
typedef void Segment(const uint8_t *w, const void *x, int64_t stride, int64_t pairs, const Factors *factors,
                     float *main);

/* Add `sum` to main, scaled. It holds `blocks` blocks of 16 outputs from block `first` on. */
QK_INLINE void finish_segment(int tokens, int first, int blocks, __m512 sum[MAX_TOKENS][4], const Factors *factors,
                              float *main) {
    main += 16 * first;
    if (factors->dense) {
        UNROLL for (int m = 0; m < tokens; m++)
            UNROLL for (int b = 0; b < blocks; b++) {
                float *to = main + QK_PANEL * m + 16 * b;
                _mm512_storeu_ps(to, _mm512_add_ps(sum[m][b], _mm512_loadu_ps(to)));
            }
        return;
    }
    if (factors->inputs)
        UNROLL for (int m = 0; m < tokens; m++) {
            __m512 input = _mm512_set1_ps(factors->inputs[m * factors->stride]);
            UNROLL for (int b = 0; b < blocks; b++)
                sum[m][b] = _mm512_fnmadd_ps(factors->zero[first + b], input, sum[m][b]);
        }
    UNROLL for (int m = 0; m < tokens; m++)
        UNROLL for (int b = 0; b < blocks; b++) {
            float *to = main + QK_PANEL * m + 16 * b;
            _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[m][b], factors->scale[first + b], _mm512_loadu_ps(to)));
        }
}

/* Prefetch the next run of unquantized values while the first block of tokens uses this run. */
QK_INLINE void fetch_next(int storage, const uint8_t *w, const Factors *factors) {
    if ((storage == QK_BF16 || storage == QK_F32) && factors->read_ahead)
        UNROLL for (int i = 0; i < PAIR_BYTES[storage]; i += 64) _mm_prefetch((const char *)w + 16384 + i, _MM_HINT_T1);
}

#if QK_AVX512
#include "linear_avx512.h"
#else
#include "linear_floats.h"
#endif

#define DEFINE(kind, type, storage, tokens) \
    static void kind##_##storage##_##tokens(const uint8_t *w, const void *x, int64_t stride, int64_t pairs, \
                                            const Factors *factors, float *main) { \
        segment_##kind(storage, tokens, w, (const type *)x, stride, pairs, factors, main); \
    }
#define DEFINE_ALL(kind, type, storage) \
    DEFINE(kind, type, storage, 1) \
    DEFINE(kind, type, storage, 2) \
    DEFINE(kind, type, storage, 3) \
    DEFINE(kind, type, storage, 4) \
    DEFINE(kind, type, storage, 5) \
    DEFINE(kind, type, storage, 6)
#define ROW(kind, storage) \
    [storage] = {kind##_##storage##_1, kind##_##storage##_2, kind##_##storage##_3, \
                 kind##_##storage##_4, kind##_##storage##_5, kind##_##storage##_6}

DEFINE_ALL(f32, float, QK_F32)
DEFINE_ALL(f32, float, QK_F16)
DEFINE_ALL(f32, float, QK_BF16)
DEFINE_ALL(f32, float, QK_W4)
DEFINE_ALL(f32, float, QK_W8)
DEFINE_ALL(f32, float, QK_FP8)

static Segment *const SEGMENTS_F32[QK_U8][MAX_TOKENS] = {ROW(f32, QK_F32), ROW(f32, QK_F16), ROW(f32, QK_BF16),
                                                          ROW(f32, QK_W4), ROW(f32, QK_W8), ROW(f32, QK_FP8)};

#if QK_INT16
#include "linear_int16.h"
DEFINE_ALL(i16, int16_t, QK_W4)
DEFINE_ALL(i16, int16_t, QK_W8)

static Segment *const SEGMENTS_I16[QK_U8][MAX_TOKENS] = {ROW(i16, QK_W4), ROW(i16, QK_W8)};
#endif

#if QK_AVX512
DEFINE_ALL(bf16, uint16_t, QK_BF16)
DEFINE_ALL(bf16, uint16_t, QK_W4)
DEFINE_ALL(bf16, uint16_t, QK_H8)
DEFINE_ALL(bf16, uint16_t, QK_FP8)

static Segment *const SEGMENTS_BF16[QK_U8][MAX_TOKENS] = {ROW(bf16, QK_BF16), ROW(bf16, QK_W4), ROW(bf16, QK_H8),
                                                           ROW(bf16, QK_FP8)};
#endif
