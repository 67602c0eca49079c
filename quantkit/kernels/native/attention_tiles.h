/* The two products of attention, as tiles that keep their sums in registers. Scores have BLOCK floats per row. */
#pragma once
#include "vector_math.h"

enum { BLOCK = 64 };

/* ---- scores: rows x tokens dot products ---- */

QK_INLINE void dot_4x4(const float *query, const float *key, int64_t width, float *scores) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sums[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 16) {
        __m512 keys[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++)
            keys[t] = _mm512_loadu_ps(key + t * width + k);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m512 q = _mm512_loadu_ps(query + r * width + k);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++)
                sums[r * 4 + t] = _mm512_fmadd_ps(q, keys[t], sums[r * 4 + t]);
        }
    }
    __m512 all = qk_sum_each(sums);
    _mm_storeu_ps(scores, _mm512_castps512_ps128(all));
    _mm_storeu_ps(scores + BLOCK, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(scores + 2 * BLOCK, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(scores + 3 * BLOCK, _mm512_extractf32x4_ps(all, 3));
}

QK_INLINE void dot_1x16(const float *query, const float *key, int64_t width, float *scores) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sums[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 16) {
        __m512 q = _mm512_loadu_ps(query + k);
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++)
            sums[t] = _mm512_fmadd_ps(q, _mm512_loadu_ps(key + t * width + k), sums[t]);
    }
    _mm512_storeu_ps(scores, qk_sum_each(sums));
}

/* ---- weights times values ---- */

QK_INLINE void add_tile(const float *weights, const float *values, int64_t tokens, int64_t width, float *out, int rows,
                        int chunks) {
    __m512 sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++)
            sums[r][c] = _mm512_loadu_ps(out + r * width + c * 16);
    for (int64_t t = 0; t < tokens; t++) {
        __m512 v[4];
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++)
            v[c] = _mm512_loadu_ps(values + t * width + c * 16);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 weight = _mm512_set1_ps(weights[r * BLOCK + t]);
#pragma GCC unroll 4
            for (int c = 0; c < chunks; c++)
                sums[r][c] = _mm512_fmadd_ps(weight, v[c], sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++)
            _mm512_storeu_ps(out + r * width + c * 16, sums[r][c]);
}

QK_INLINE void add_rows(const float *weights, const float *values, int64_t tokens, int64_t width, float *out,
                        int rows) {
    int64_t k = 0;
    for (; k + 64 <= width; k += 64)
        add_tile(weights, values + k, tokens, width, out + k, rows, 4);
    switch ((width - k) / 16) {
    case 3: add_tile(weights, values + k, tokens, width, out + k, rows, 3); break;
    case 2: add_tile(weights, values + k, tokens, width, out + k, rows, 2); break;
    case 1: add_tile(weights, values + k, tokens, width, out + k, rows, 1); break;
    }
}
