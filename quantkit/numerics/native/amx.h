/* Products of bf16 with AMX tiles, for matrices packed as in tile.h. A packed block of 16 pairs of rows can be loaded
   as the right factor as it is. The left factor must be turned, so that the pairs of a column are side by side. Tiles 0
   to 3 hold 2 x 2 tiles of sums, 4 and 5 the left factor, 6 and 7 the right factor. */
#pragma once
#include "tile.h"

#if QK_AMX

enum { STEP = 16, TILE = 512 }; /* pairs of rows in a tile; bf16 numbers in a tile */
#define QK_FENCE __asm__ volatile("" ::: "memory") /* gcc does not know that tiles are loaded from memory */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

/* Configure this thread's tiles for `pairs` pairs of rows at once. The caller must call `_tile_release` after the last
   product. */
QK_INLINE void shape_tiles(int pairs) {
    Shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = i < 6 ? 16 : pairs, shapes.bytes[i] = i == 4 || i == 5 ? 4 * pairs : 64;
    QK_FENCE;
    _tile_loadconfig(&shapes);
}

/* Rearrange 16 x 16 pairs from [pair][column] to [column][pair]; zeros replace missing pairs. */
QK_INLINE void turn(const uint16_t *packed, int64_t pairs, uint16_t *turned) {
    __m512i x[16], y[16];
    UNROLL for (int i = 0; i < 16; i++) x[i] = i < pairs ? _mm512_loadu_si512(packed + 32 * i) : _mm512_setzero_si512();
    UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) { /* columns i, 4 + i, 8 + i, 12 + i */
        const __m512i even = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88), odd = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
        const __m512i evens = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        const __m512i odds = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
        _mm512_storeu_si512(turned + 32 * i, _mm512_shuffle_i32x4(even, evens, 0x88));
        _mm512_storeu_si512(turned + 32 * (4 + i), _mm512_shuffle_i32x4(odd, odds, 0x88));
        _mm512_storeu_si512(turned + 32 * (8 + i), _mm512_shuffle_i32x4(even, evens, 0xdd));
        _mm512_storeu_si512(turned + 32 * (12 + i), _mm512_shuffle_i32x4(odd, odds, 0xdd));
    }
}

/* Add one step to the sums of `tall` by `wide` tiles. left_block, right_block: numbers from one block to the next. */
QK_INLINE void multiply_tiles(int tall, int wide, const uint16_t *left, int64_t left_block, const uint16_t *right,
                              int64_t right_block) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (wide > 1) {
        _tile_loadd(7, right + right_block, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (tall > 1) {
        _tile_loadd(5, left + left_block, 64);
        _tile_dpbf16ps(2, 5, 6);
        if (wide > 1) _tile_dpbf16ps(3, 5, 7);
    }
}

QK_INLINE void clear_tiles(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Store the sums in the order of the product, (16 * tall, 32). */
QK_INLINE void store_tiles(int tall, int wide, float *sums) {
    _tile_stored(0, sums, 128);
    if (wide > 1) _tile_stored(1, sums + 16, 128);
    if (tall > 1) {
        _tile_stored(2, sums + 16 * 32, 128);
        if (wide > 1) _tile_stored(3, sums + 16 * 32 + 16, 128);
    }
}

#endif
