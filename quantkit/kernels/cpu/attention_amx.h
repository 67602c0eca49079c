/* The two products of attention with AMX tiles: bf16 operands in tiles of 16 rows x 32 steps, float32 sums. */
#pragma once
#include "amx.h"
#include "attention_tiles.h"

#if QK_AMX
enum { TILE = 16 }; /* rows of a tile; also its columns, of 4 bytes each */

/* Transpose 16 x 16 words of 4 bytes. Strides are in words. */
QK_INLINE void transpose_16(const int32_t *from, int64_t from_stride, int32_t *to, int64_t to_stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + k + 2]);
            a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + k + 2]);
        }
    /* Row i of `a` now holds, in each of its four quarters q, column 4 q + i % 4 of rows i / 4 * 4 .. + 3. */
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i even = _mm512_shuffle_i32x4(a[k], a[k + 4], 0x88), odd = _mm512_shuffle_i32x4(a[k], a[k + 4], 0xDD);
        __m512i even2 = _mm512_shuffle_i32x4(a[k + 8], a[k + 12], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(a[k + 8], a[k + 12], 0xDD);
        _mm512_storeu_si512(to + k * to_stride, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_storeu_si512(to + (k + 8) * to_stride, _mm512_shuffle_i32x4(even, even2, 0xDD));
        _mm512_storeu_si512(to + (k + 4) * to_stride, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_storeu_si512(to + (k + 12) * to_stride, _mm512_shuffle_i32x4(odd, odd2, 0xDD));
    }
}

/* Compute scores (rows, BLOCK) of all queries with the keys of a block, and with undefined keys after `tokens`, whose
   scores are masked later. `rows` and `width` are multiples of 16 and 32.

   query: (rows, width) bf16. keys: (BLOCK, width) bf16. pairs: memory for the transposed keys, as large as `keys`. */
QK_INLINE void score_tiles(const char *query, int64_t rows, const char *keys, int64_t tokens, int64_t width,
                           int32_t *pairs, float *scores) {
    for (int64_t t = 0; t < tokens; t += TILE)
        for (int64_t pair = 0; pair < width / 2; pair += TILE)
            transpose_16((const int32_t *)keys + t * (width / 2) + pair, width / 2, pairs + pair * BLOCK + t, BLOCK);
    QK_FENCE;
    for (int64_t row = 0; row < rows; row += TILE) {
        QK_CLEAR_SUMS;
        for (int64_t k = 0; k < width; k += 32) {
            const int32_t *right = pairs + k / 2 * BLOCK;
            _tile_loadd(4, query + (row * width + k) * 2, width * 2);
            _tile_loadd(6, right, BLOCK * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right + TILE, BLOCK * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, right + 2 * TILE, BLOCK * 4);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, right + 3 * TILE, BLOCK * 4);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, scores + row * BLOCK, BLOCK * 4);
        _tile_stored(1, scores + row * BLOCK + TILE, BLOCK * 4);
        _tile_stored(2, scores + row * BLOCK + 2 * TILE, BLOCK * 4);
        _tile_stored(3, scores + row * BLOCK + 3 * TILE, BLOCK * 4);
    }
    QK_FENCE;
}

/* out (rows, width) += weights (rows, BLOCK) x values (tokens, width). `rows` and `width` are multiples of 16.

   weights: bf16, with BLOCK * 4 bytes per row. pairs: values in pairs of tokens, see `kv_pair_tokens`. After `tokens`,
   both are overwritten with zeros up to a multiple of 32 tokens, because 0 times an undefined number may be NaN. */
QK_INLINE void add_value_tiles(char *weights, int64_t rows, char *pairs, int64_t tokens, int64_t width, float *out) {
    int64_t steps = (tokens + 31) / 32, known = (tokens + 1) / 2;
    memset(pairs + known * width * 4, 0, (size_t)((steps * TILE - known) * width * 4));
    if ((tokens + 15) / 16 % 2) /* `soften_row` writes 16 weights at a time */
        for (int64_t row = 0; row < rows; row++)
            memset(weights + row * BLOCK * 4 + (tokens + 15) / 16 * 32, 0, 32);
    QK_FENCE;
    for (int64_t row = 0; row < rows; row += TILE)
        for (int64_t k = 0; k < width; k += TILE) {
            _tile_loadd(0, out + row * width + k, width * 4);
            for (int64_t step = 0; step < steps; step++) {
                _tile_loadd(4, weights + row * BLOCK * 4 + step * 64, BLOCK * 4);
                _tile_loadd(6, pairs + (step * TILE * width + k) * 4, width * 4);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, out + row * width + k, width * 4);
        }
    QK_FENCE;
}
#endif
