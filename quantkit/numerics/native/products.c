/* Products left' right of bf16 matrices with the same number of rows, summed in float32. See numerics/matmul.py. */
#include "tile.h"

enum { CHUNK = 256 }; /* pairs multiplied at once, so that what all tiles of a strip read stays in cache */

QK_INLINE void pack_pair(const uint16_t *even, const uint16_t *odd, int64_t width, uint16_t *out) {
    if (width < 16) memset(out, 0, 64);
    for (int64_t i = 0; i < width; i++) out[2 * i] = even[i], out[2 * i + 1] = odd ? odd[i] : 0;
}

/* Pack in squares of pairs and columns, so that only small parts of both matrices are in use at once. */
QK_EXPORT void qk_pack(const uint16_t *x, int64_t stride, int64_t rows, int64_t columns, uint16_t *packed,
                       int64_t of_block, int threads) {
    enum { PAIRS = 32, COLUMNS = 256 };
    const int64_t pairs = (rows + 1) / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1) collapse(2)
    for (int64_t from = 0; from < pairs; from += PAIRS)
        for (int64_t start = 0; start < columns; start += COLUMNS)
            for (int64_t p = from; p < pairs && p < from + PAIRS; p++)
                for (int64_t c = start; c < columns && c < start + COLUMNS; c += 16) {
                    const uint16_t *even = x + 2 * p * stride + c, *odd = 2 * p + 1 == rows ? NULL : even + stride;
                    uint16_t *out = packed + c / 16 * of_block + 32 * p;
                    if (columns - c < 16) pack_pair(even, odd, columns - c, out);
                    else if (odd) pack_pair(even, odd, 16, out);
                    else pack_pair(even, NULL, 16, out);
                }
}

#if QK_BF16

QK_INLINE void add_tile(int wide, const uint16_t *left, const uint16_t *right, int64_t stride, int64_t pairs, float *total,
                        int64_t total_stride, int64_t rows, int64_t columns) {
    __m512 sum[TALL][WIDE];
    UNROLL for (int r = 0; r < TALL; r++)
        UNROLL for (int b = 0; b < wide; b++) sum[r][b] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++) /* prefetched while the sums are computed */
        for (int b = 0; b < wide; b++) _mm_prefetch((const char *)(total + r * total_stride + 16 * b), _MM_HINT_T0);
    tile(wide, left, right, stride, pairs, sum);
    UNROLL for (int r = 0; r < TALL; r++)
        UNROLL for (int b = 0; b < wide; b++) {
            const int64_t missing = columns - 16 * b;
            if (r >= rows || missing <= 0) continue;
            const __mmask16 mask = missing >= 16 ? 0xffff : (__mmask16)((1u << missing) - 1);
            float *own = total + r * total_stride + 16 * b;
            _mm512_mask_storeu_ps(own, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, own), sum[r][b]));
        }
}

/* Add left' right to (rows, columns) of `total`. lower: column of the first row in which the diagonal starts; values
   above the diagonal need not be computed. Below 0: compute all values. left_block, right_block: numbers from one block
   to the next. */
QK_EXPORT void qk_add_products(const uint16_t *left, const uint16_t *right, int64_t left_block, int64_t right_block,
                               int64_t tokens, float *total, int64_t rows, int64_t columns, int64_t lower, int threads) {
#if QK_AMX
    if (qk_has_amx()) {
        qk_add_products_amx(left, right, left_block, right_block, tokens, total, rows, columns, lower, threads);
        return;
    }
#endif
    const int64_t all = (tokens + 1) / 2, strips = (columns + 16 * WIDE - 1) / (16 * WIDE);
    for (int64_t from = 0; from < all; from += CHUNK) {
        const int64_t pairs = all - from < CHUNK ? all - from : CHUNK;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
        for (int64_t strip = strips - 1; strip >= 0; strip--) {
            const int64_t first = 16 * WIDE * strip, left_over = columns - first;
            const int64_t start = lower < 0 || first <= lower ? 0 : (first - lower) / TALL * TALL;
            const uint16_t *own = right + first / 16 * right_block + 32 * from;
            for (int64_t r = start; r < rows; r += TALL) {
                const uint16_t *factor = left + r / 16 * left_block + 32 * from + 2 * (r % 16);
                float *sums = total + r * columns + first;
                const int64_t height = rows - r < TALL ? rows - r : TALL;
                if (left_over > 32) add_tile(3, factor, own, right_block, pairs, sums, columns, height, left_over);
                else if (left_over > 16) add_tile(2, factor, own, right_block, pairs, sums, columns, height, left_over);
                else add_tile(1, factor, own, right_block, pairs, sums, columns, height, left_over);
            }
        }
    }
}

#endif

/* Whether this library multiplies bf16 with AVX-512. */
QK_EXPORT int qk_has_avx512(void) { return QK_BF16; }
