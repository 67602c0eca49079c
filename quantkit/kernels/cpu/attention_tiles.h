/* The two products of attention, in tiles whose sums stay in registers. Scores have BLOCK entries per row. Each product
   exists for floats and for bf16. The bf16 products multiply pairs: of channels for scores, of tokens for values. */
#pragma once
#include "vector_math.h"

enum { BLOCK = 64, CHUNKS = QK_AVX512 ? 4 : 1 /* chunks of 16 values whose sums are in registers at once */ };

/* ---- scores: rows x tokens dot products ---- */

/* Return sum + a * b for 16 floats; for bf16, each lane adds the products of a pair. */
QK_INLINE __m512 multiply_add(__m512 a, __m512 b, __m512 sum, int half) {
    (void)half;
#if QK_AVX512
    if (half) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
    return _mm512_fmadd_ps(a, b, sum);
}

/* Strides are in bytes. `bytes`: length of each row, multiplied 64 bytes at a time. */
#if QK_AVX512
QK_INLINE void dot_4x4(const char *query, int64_t query_stride, const char *key, int64_t key_stride, int64_t bytes,
                       float *scores, int half) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sums[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < bytes; k += 64) {
        __m512 keys[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++)
            keys[t] = _mm512_loadu_ps(key + t * key_stride + k);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m512 q = _mm512_loadu_ps(query + r * query_stride + k);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++)
                sums[r * 4 + t] = multiply_add(q, keys[t], sums[r * 4 + t], half);
        }
    }
    __m512 all = qk_sum_each(sums);
    _mm_storeu_ps(scores, _mm512_castps512_ps128(all));
    _mm_storeu_ps(scores + BLOCK, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(scores + 2 * BLOCK, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(scores + 3 * BLOCK, _mm512_extractf32x4_ps(all, 3));
}

QK_INLINE void dot_1x16(const char *query, const char *key, int64_t key_stride, int64_t bytes, float *scores,
                        int half) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sums[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < bytes; k += 64) {
        __m512 q = _mm512_loadu_ps(query + k);
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++)
            sums[t] = multiply_add(q, _mm512_loadu_ps(key + t * key_stride + k), sums[t], half);
    }
    _mm512_storeu_ps(scores, qk_sum_each(sums));
}
#else
/* Sum each of eight vectors; lane i of the result is the sum of v[i]. */
QK_INLINE __m256 sum_eight(const __m256 *v) {
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* Return the scores of `rows` queries with 8 / rows keys. The order of summation is the same for any number of rows. */
QK_INLINE __m256 dot_eight(const char *query, int64_t query_stride, const char *key, int64_t key_stride, int64_t bytes,
                           int rows) {
    int columns = 8 / rows;
    __m256 sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        sums[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < bytes; k += 32)
#pragma GCC unroll 8
        for (int t = 0; t < columns; t++) {
            __m256 v = _mm256_loadu_ps((const float *)(key + t * key_stride + k));
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                __m256 q = _mm256_loadu_ps((const float *)(query + r * query_stride + k));
                sums[r * columns + t] = _mm256_fmadd_ps(q, v, sums[r * columns + t]);
            }
        }
    return sum_eight(sums);
}

QK_INLINE void dot_4x4(const char *query, int64_t query_stride, const char *key, int64_t key_stride, int64_t bytes,
                       float *scores, int half) {
    (void)half;
    for (int r = 0; r < 4; r += 2, scores += 2 * BLOCK) {
        __m256 two = dot_eight(query + r * query_stride, query_stride, key, key_stride, bytes, 2);
        _mm_storeu_ps(scores, _mm256_castps256_ps128(two));
        _mm_storeu_ps(scores + BLOCK, _mm256_extractf128_ps(two, 1));
    }
}

QK_INLINE void dot_1x16(const char *query, const char *key, int64_t key_stride, int64_t bytes, float *scores,
                        int half) {
    (void)half;
    for (int t = 0; t < 16; t += 8)
        _mm256_storeu_ps(scores + t, dot_eight(query, 0, key + t * key_stride, key_stride, bytes, 1));
}
#endif

/* Compute the scores of `rows` queries with `tokens` keys, and with up to 15 undefined keys after these, whose scores
   are masked later. So the block must have room for BLOCK tokens. */
QK_INLINE void dot_rows(const char *query, int64_t query_stride, int64_t rows, const char *key, int64_t key_stride,
                        int64_t tokens, int64_t bytes, float *scores, int half) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
        for (int64_t t = 0; t < tokens; t += 4)
            dot_4x4(query + row * query_stride, query_stride, key + t * key_stride, key_stride, bytes,
                    scores + row * BLOCK + t, half);
    for (; row < rows; row++)
        for (int64_t t = 0; t < tokens; t += 16)
            dot_1x16(query + row * query_stride, key + t * key_stride, key_stride, bytes, scores + row * BLOCK + t,
                     half);
}

/* Copy one float weight, or two adjacent bf16 weights, to all lanes. */
QK_INLINE __m512 spread(const char *weight) { return _mm512_castsi512_ps(_mm512_set1_epi32(*(const int32_t *)weight)); }

/* out (rows, width) += weights (rows, BLOCK) x values (steps, width). A step is a token, or for bf16 a pair of
   tokens. */
QK_INLINE void add_tile(const char *weights, int64_t weight_stride, const char *values, int64_t steps, int64_t width,
                        float *out, int rows, int chunks, int half) {
    __m512 sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++)
            sums[r][c] = _mm512_loadu_ps(out + r * width + c * 16);
    for (int64_t t = 0; t < steps; t++) {
        __m512 v[4];
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++)
            v[c] = _mm512_loadu_ps(values + (t * width + c * 16) * 4);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 weight = spread(weights + r * weight_stride + t * 4);
#pragma GCC unroll 4
            for (int c = 0; c < chunks; c++)
                sums[r][c] = multiply_add(weight, v[c], sums[r][c], half);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++)
            _mm512_storeu_ps(out + r * width + c * 16, sums[r][c]);
}

QK_INLINE void add_some(const char *weights, int64_t weight_stride, const char *values, int64_t steps, int64_t width,
                        float *out, int rows, int half) {
    int64_t k = 0;
    for (; k + 16 * CHUNKS <= width; k += 16 * CHUNKS)
        add_tile(weights, weight_stride, values + k * 4, steps, width, out + k, rows, CHUNKS, half);
    values += k * 4, out += k;
    switch ((width - k) / 16) {
    case 3: add_tile(weights, weight_stride, values, steps, width, out, rows, 3, half); break;
    case 2: add_tile(weights, weight_stride, values, steps, width, out, rows, 2, half); break;
    case 1: add_tile(weights, weight_stride, values, steps, width, out, rows, 1, half); break;
    }
}

QK_INLINE void add_rows(const char *weights, int64_t weight_stride, int64_t rows, const char *values, int64_t steps,
                        int64_t width, float *out, int half) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
        add_some(weights + row * weight_stride, weight_stride, values, steps, width, out + row * width, 4, half);
    for (; row < rows; row++)
        add_some(weights + row * weight_stride, weight_stride, values, steps, width, out + row * width, 1, half);
}
