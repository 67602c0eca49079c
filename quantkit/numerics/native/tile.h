/* Products of pairs of bf16. Matrices are packed in blocks of 16 columns. A block is [row / 2][column][even row, odd
   row], with zeros for missing rows and columns. */
#pragma once
#include "native.h"

enum { WIDE = 3, TALL = 8 }; /* per tile: blocks of the right factor, columns of the left factor */

#if QK_BF16

/* Multiply eight columns of a block of the left factor, from the one that `left` points at, with `wide` blocks of the
   right factor. */
QK_INLINE void tile(int wide, const uint16_t *left, const uint16_t *right, int64_t stride, int64_t pairs,
                    __m512 sum[TALL][WIDE]) {
    for (int64_t p = 0; p < pairs; p++, left += 32, right += 32) {
        __m512i others[WIDE];
        UNROLL for (int b = 0; b < wide; b++) others[b] = _mm512_loadu_si512(right + b * stride);
        UNROLL for (int r = 0; r < TALL; r++) {
            int32_t both;
            memcpy(&both, left + 2 * r, 4);
            const __m512bh own = (__m512bh)_mm512_set1_epi32(both);
            UNROLL for (int b = 0; b < wide; b++) sum[r][b] = _mm512_dpbf16_ps(sum[r][b], own, (__m512bh)others[b]);
        }
    }
}

#endif
