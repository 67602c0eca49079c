/* The AVX-512 instructions that the kernels use, for CPUs that lack them.

   Only quantkit.h includes this file, after avx2.h or neon.h. Those two define the vectors of sixteen lanes and what
   depends on the CPU; this file has the rest, and the names. Each function does what Intel's guide says of the
   instruction, with two exceptions: masks of loads and stores must select the first lanes, and subnormal numbers are
   not flushed to zero when they are converted to bf16. */
#pragma once

/* ---- lane by lane ---- */

#define _mm512_set1_ps qk_set1_ps
#define _mm512_set1_epi32 qk_set1_epi32
#define _mm512_setzero_ps() qk_set1_ps(0)
#define _mm512_setzero_si512() qk_set1_epi32(0)
#define _mm512_add_ps qk_add_ps
#define _mm512_sub_ps qk_sub_ps
#define _mm512_mul_ps qk_mul_ps
#define _mm512_div_ps qk_div_ps
#define _mm512_max_ps qk_max_ps
#define _mm512_min_ps qk_min_ps
#define _mm512_and_si512 qk_and_si512
#define _mm512_or_si512 qk_or_si512
#define _mm512_add_epi32 qk_add_epi32
#define _mm512_sub_epi32 qk_sub_epi32
#define _mm512_mullo_epi32 qk_mullo_epi32
#define _mm512_max_epi32 qk_max_epi32
#define _mm512_fmadd_ps qk_fmadd_ps
#define _mm512_fmsub_ps qk_fmsub_ps
#define _mm512_fnmadd_ps qk_fnmadd_ps
#define _mm512_slli_epi32 qk_slli_epi32
#define _mm512_srli_epi32 qk_srli_epi32
#define _mm512_srai_epi32 qk_srai_epi32
#define _mm512_castps_si512 qk_castps_si512
#define _mm512_castsi512_ps qk_castsi512_ps
#define _mm512_cvtepi32_ps qk_cvtepi32_ps
#define _mm512_cvtps_epi32 qk_cvtps_epi32

/* ---- memory ---- */

#define _mm512_loadu_ps qk_loadu_ps
#define _mm512_storeu_ps qk_storeu_ps
#define _mm512_store_ps qk_storeu_ps
#define _mm512_loadu_si512 qk_loadu_si512

/* ---- masks ---- */

#define _mm512_mask_blend_ps qk_blend
#define _mm512_mask_mov_ps(other, mask, v) qk_blend(mask, other, v)
#define _mm512_maskz_mov_ps(mask, v) qk_blend(mask, qk_set1_ps(0), v)
#define _mm512_mask_sub_ps(other, mask, a, b) qk_blend(mask, other, qk_sub_ps(a, b))
#define _mm512_mask_min_ps(other, mask, a, b) qk_blend(mask, other, qk_min_ps(a, b))
#define _mm512_mask_max_ps(other, mask, a, b) qk_blend(mask, other, qk_max_ps(a, b))
#define _mm512_mask_mov_epi32(other, mask, v) \
    qk_castps_si512(qk_blend(mask, qk_castsi512_ps(other), qk_castsi512_ps(v)))
#define _mm512_cmplt_epu32_mask qk_cmplt_epu32_mask
#define _mm512_maskz_loadu_ps qk_maskz_loadu_ps
#define _mm512_mask_storeu_ps qk_mask_storeu_ps

/* Load or store bytes or words: a whole vector, or the first lanes through a copy on the stack. */
#define QK_FIRST(vector, bits, element, load, store) \
    QK_INLINE vector qk_load_first_##bits##_##element(uint32_t mask, const void *p) { \
        if (mask == (uint32_t)((1ull << (bits / element)) - 1)) return load((const vector *)p); \
        vector v = {0}; \
        memcpy(&v, p, (size_t)__builtin_popcount(mask) * element / 8); \
        return v; \
    } \
    QK_INLINE void qk_store_first_##bits##_##element(void *p, uint32_t mask, vector v) { \
        if (mask == (uint32_t)((1ull << (bits / element)) - 1)) store((vector *)p, v); \
        else memcpy(p, &v, (size_t)__builtin_popcount(mask) * element / 8); \
    }
QK_FIRST(__m128i, 128, 8, _mm_loadu_si128, _mm_storeu_si128)
QK_FIRST(__m256i, 256, 16, _mm256_loadu_si256, _mm256_storeu_si256)
#define _mm_maskz_loadu_epi8 qk_load_first_128_8
#define _mm_mask_storeu_epi8 qk_store_first_128_8
#define _mm256_maskz_loadu_epi16 qk_load_first_256_16
#define _mm256_mask_storeu_epi16 qk_store_first_256_16

/* ---- conversions between number types ---- */

/* Round to nearest even: add half a unit of the last kept bit, minus one if that bit is 0. NaN stays NaN. */
QK_INLINE __m256i qk_cvtneps_pbh(__m512 v) {
    __m512i bits = qk_castps_si512(v), odd = qk_and_si512(qk_srli_epi32(bits, 16), qk_set1_epi32(1));
    __m512i rounded = qk_add_epi32(bits, qk_add_epi32(odd, qk_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, qk_or_si512(bits, qk_set1_epi32(1 << 22)));
    return qk_pack_words(qk_srli_epi32(rounded, 16));
}
#define _mm512_cvtepu16_epi32 qk_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 qk_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 qk_cvtepu8_epi32
#define _mm512_cvtph_ps qk_cvtph_ps
#define _mm512_cvtps_ph(v, rounding) qk_to_half(v)
#define _mm512_cvtepi32_epi8 qk_cvtepi32_epi8
#define _mm512_cvtsepi32_epi8 qk_cvtsepi32_epi8
#define _mm512_cvtneps_pbh qk_cvtneps_pbh

/* ---- arithmetic that AVX2 and NEON lack ---- */

QK_INLINE __m512 qk_abs_ps(__m512 v) {
    return qk_castsi512_ps(qk_and_si512(qk_castps_si512(v), qk_set1_epi32(0x7FFFFFFF)));
}
/* Round to the nearest multiple of 2^-places, ties to even. */
QK_INLINE __m512 qk_round_to(__m512 v, int places) {
    v = qk_mul_ps(v, qk_set1_ps((float)(1 << places)));
    return qk_mul_ps(qk_round_ps(v), qk_set1_ps(1.0f / (float)(1 << places)));
}
/* Return a * 2^n for whole n in -250 .. 250. It multiplies twice, because 2^n may not be a normal number. */
QK_INLINE __m512 qk_scalef_ps(__m512 a, __m512 n) {
    __m512i all = qk_cvtps_epi32(n), first = qk_srai_epi32(all, 1), second = qk_sub_epi32(all, first);
    __m512i bias = qk_set1_epi32(127);
    a = qk_mul_ps(a, qk_castsi512_ps(qk_slli_epi32(qk_add_epi32(first, bias), 23)));
    return qk_mul_ps(a, qk_castsi512_ps(qk_slli_epi32(qk_add_epi32(second, bias), 23)));
}
#define _mm512_abs_ps qk_abs_ps
#define _mm512_roundscale_ps(v, control) qk_round_to(v, (control) >> 4)
#define _mm512_scalef_ps qk_scalef_ps
#define _mm512_reduce_add_ps qk_reduce_add_ps
#define _mm512_reduce_max_ps qk_reduce_max_ps
#define _mm512_reduce_min_ps qk_reduce_min_ps
#define _mm512_reduce_max_epi32 qk_reduce_max_epi32
