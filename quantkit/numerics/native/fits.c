/* Normal equations of scales: for each output and each pair of groups of inputs, the sum of code x Hessian x code. See
   compress/algorithms/_gptq_fit.py. */
#include "tile.h"

#if QK_BF16

/* Compute these sums for one pair of groups of `size` inputs, with one output per lane and `wide` blocks of outputs.
   own: codes of the first group; others: codes of the same or of a later group. */
QK_INLINE void meet(int wide, const uint16_t *hessian, int64_t from, const uint16_t *own, const uint16_t *others,
                    int64_t size, int64_t outputs, float *sums, int64_t count) {
    const int64_t pairs = (size + 1) / 2;
    __m512 total[WIDE];
    UNROLL for (int b = 0; b < wide; b++) total[b] = _mm512_setzero_ps();
    for (int64_t c = 0; c < size; c += TALL) {
        __m512 sum[TALL][WIDE];
        UNROLL for (int r = 0; r < TALL; r++)
            UNROLL for (int b = 0; b < wide; b++) sum[r][b] = _mm512_setzero_ps();
        const int64_t column = from + c;
        tile(wide, hessian + column / 16 * pairs * 32 + 2 * (column % 16), own, pairs * 32, pairs, sum);
        UNROLL for (int r = 0; r < TALL; r++)
            UNROLL for (int b = 0; b < wide; b++) {
                const uint16_t *codes = others + (c + r) * outputs + 16 * b;
                const __m512i wider = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)codes));
                total[b] = _mm512_fmadd_ps(sum[r][b], _mm512_castsi512_ps(_mm512_slli_epi32(wider, 16)), total[b]);
            }
    }
    UNROLL for (int b = 0; b < wide; b++) {
        if (16 * b >= count) continue;
        _mm512_mask_storeu_ps(sums + 16 * b, count - 16 * b >= 16 ? 0xffff : (__mmask16)((1u << (count - 16 * b)) - 1), total[b]);
    }
}

/* Compute the sums of a few groups, each with itself and with all later groups: `normal` (groups, all, outputs). codes:
   (all * size, padded) bf16; zeros pad the outputs to whole blocks of 16. packed: the same codes, packed group by
   group. hessian: the rows of each of the few groups, packed. size: a multiple of 8. */
QK_EXPORT void qk_normal_equations(const uint16_t *codes, const uint16_t *packed, const uint16_t *hessian, float *normal,
                                   int64_t first, int64_t groups, int64_t all, int64_t size, int64_t outputs,
                                   int64_t padded, int threads) {
#if QK_AMX
    if (qk_has_amx() && qk_normal_equations_amx(codes, packed, hessian, normal, first, groups, all, size, outputs, padded, threads))
        return;
#endif
    const int64_t pairs = (size + 1) / 2, of_group = padded * 2 * pairs, of_rows = (all * size + 15) / 16 * pairs * 32;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t n = 0; n < outputs; n += 16 * WIDE)
        for (int64_t i = 0; i < groups; i++) {
            const uint16_t *own = packed + (first + i) * of_group + n * 2 * pairs;
            for (int64_t j = first + i; j < all; j++) {
                const uint16_t *others = codes + j * size * padded + n, *rows = hessian + i * of_rows;
                float *sums = normal + (i * all + j) * outputs + n;
                const int64_t left = outputs - n;
                if (left > 32) meet(3, rows, j * size, own, others, size, padded, sums, left);
                else if (left > 16) meet(2, rows, j * size, own, others, size, padded, sums, left);
                else meet(1, rows, j * size, own, others, size, padded, sums, left);
            }
        }
}

#endif
