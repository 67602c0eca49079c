/* The vectors of emulated.h as pairs of AVX2 vectors, and what its instructions do with AVX2, FMA and F16C.

   Only quantkit.h includes this file. */
#pragma once
#include <immintrin.h>

typedef struct { __m256 low, high; } qk_m512;
typedef struct { __m256i low, high; } qk_m512i;
#define __m512 qk_m512
#define __m512i qk_m512i

/* ---- lane by lane, the same for both halves ---- */

#define QK_ONE(name, from, to, half) \
    QK_INLINE to qk_##name(from a) { return (to){half(a.low), half(a.high)}; }
#define QK_TWO(name, type, half) \
    QK_INLINE type qk_##name(type a, type b) { return (type){half(a.low, b.low), half(a.high, b.high)}; }
#define QK_THREE(name, half) \
    QK_INLINE __m512 qk_##name(__m512 a, __m512 b, __m512 c) { \
        return (__m512){half(a.low, b.low, c.low), half(a.high, b.high, c.high)}; \
    }
#define QK_SHIFT(name, half) \
    QK_INLINE __m512i qk_##name(__m512i a, int count) { return (__m512i){half(a.low, count), half(a.high, count)}; }
#define QK_SET(name, number, type, half) \
    QK_INLINE type qk_##name(number value) { return (type){half(value), half(value)}; }

QK_SET(set1_ps, float, __m512, _mm256_set1_ps)
QK_SET(set1_epi32, int, __m512i, _mm256_set1_epi32)
QK_TWO(add_ps, __m512, _mm256_add_ps)
QK_TWO(sub_ps, __m512, _mm256_sub_ps)
QK_TWO(mul_ps, __m512, _mm256_mul_ps)
QK_TWO(div_ps, __m512, _mm256_div_ps)
QK_TWO(max_ps, __m512, _mm256_max_ps)
QK_TWO(min_ps, __m512, _mm256_min_ps)
QK_TWO(and_si512, __m512i, _mm256_and_si256)
QK_TWO(or_si512, __m512i, _mm256_or_si256)
QK_TWO(add_epi32, __m512i, _mm256_add_epi32)
QK_TWO(madd_epi16, __m512i, _mm256_madd_epi16)
QK_SHIFT(slli_epi16, _mm256_slli_epi16)
QK_SHIFT(srli_epi16, _mm256_srli_epi16)
QK_SHIFT(srai_epi16, _mm256_srai_epi16)
QK_TWO(sub_epi32, __m512i, _mm256_sub_epi32)
QK_TWO(mullo_epi32, __m512i, _mm256_mullo_epi32)
QK_TWO(max_epi32, __m512i, _mm256_max_epi32)
QK_THREE(fmadd_ps, _mm256_fmadd_ps)
QK_THREE(fmsub_ps, _mm256_fmsub_ps)
QK_THREE(fnmadd_ps, _mm256_fnmadd_ps)
QK_SHIFT(slli_epi32, _mm256_slli_epi32)
QK_SHIFT(srli_epi32, _mm256_srli_epi32)
QK_SHIFT(srai_epi32, _mm256_srai_epi32)
QK_ONE(castps_si512, __m512, __m512i, _mm256_castps_si256)
QK_ONE(castsi512_ps, __m512i, __m512, _mm256_castsi256_ps)
QK_ONE(cvtepi32_ps, __m512i, __m512, _mm256_cvtepi32_ps)
QK_ONE(cvtps_epi32, __m512, __m512i, _mm256_cvtps_epi32)
#define QK_NEAREST(v) _mm256_round_ps(v, 8)
QK_ONE(round_ps, __m512, __m512, QK_NEAREST)

/* Keep a vector in registers: GCC would load floats again for every use. */
#define QK_KEEP(v) __asm__("" : "+x"((v).low), "+x"((v).high))
/* sum += v, for 32-bit integers: GCC would move sums between registers, or to memory. */
#define QK_ADD_TO(sum, v) do { \
        __m512i added = v; \
        __asm__("vpaddd %1, %0, %0" : "+x"((sum).low) : "x"(added.low)); \
        __asm__("vpaddd %1, %0, %0" : "+x"((sum).high) : "x"(added.high)); \
    } while (0)

/* ---- memory ---- */

QK_INLINE __m512 qk_loadu_ps(const void *p) {
    return (__m512){_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)p + 8)};
}
QK_INLINE void qk_storeu_ps(void *p, __m512 v) {
    _mm256_storeu_ps((float *)p, v.low);
    _mm256_storeu_ps((float *)p + 8, v.high);
}
QK_INLINE __m512i qk_loadu_si512(const void *p) {
    return (__m512i){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}

/* ---- masks ---- */

/* Expand eight bits to eight lanes of all ones or all zeros. */
QK_INLINE __m256i qk_spread_mask(unsigned bits) {
    __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each);
}
QK_INLINE __mmask16 qk_gather_mask(__m256 low, __m256 high) {
    return (__mmask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

/* Return the lanes of b where the mask is set, and the lanes of a elsewhere. */
QK_INLINE __m512 qk_blend(__mmask16 mask, __m512 a, __m512 b) {
    return (__m512){_mm256_blendv_ps(a.low, b.low, _mm256_castsi256_ps(qk_spread_mask(mask))),
                    _mm256_blendv_ps(a.high, b.high, _mm256_castsi256_ps(qk_spread_mask(mask >> 8u)))};
}
#define _mm512_cmp_ps_mask(a, b, how) \
    qk_gather_mask(_mm256_cmp_ps((a).low, (b).low, how), _mm256_cmp_ps((a).high, (b).high, how))

/* Only for unsigned numbers below 2^31. */
QK_INLINE __mmask16 qk_cmplt_epu32_mask(__m512i a, __m512i b) {
    return qk_gather_mask(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.low, a.low)),
                          _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.high, a.high)));
}
#define _mm_cmpeq_epi8_mask(a, b) ((__mmask16)_mm_movemask_epi8(_mm_cmpeq_epi8(a, b)))

QK_INLINE __m512 qk_maskz_loadu_ps(__mmask16 mask, const float *p) {
    if (mask == 0xFFFF) return qk_loadu_ps(p);
    return (__m512){_mm256_maskload_ps(p, qk_spread_mask(mask)), _mm256_maskload_ps(p + 8, qk_spread_mask(mask >> 8u))};
}
QK_INLINE void qk_mask_storeu_ps(float *p, __mmask16 mask, __m512 v) {
    if (mask == 0xFFFF) {
        qk_storeu_ps(p, v);
        return;
    }
    _mm256_maskstore_ps(p, qk_spread_mask(mask), v.low);
    _mm256_maskstore_ps(p + 8, qk_spread_mask(mask >> 8u), v.high);
}

/* ---- conversions between number types ---- */

#define QK_UPPER(v) _mm256_extracti128_si256(v, 1)
#define QK_LOWER(v) _mm256_castsi256_si128(v)
QK_INLINE __m512i qk_cvtepu16_epi32(__m256i v) {
    return (__m512i){_mm256_cvtepu16_epi32(QK_LOWER(v)), _mm256_cvtepu16_epi32(QK_UPPER(v))};
}
QK_INLINE __m512i qk_cvtepi8_epi32(__m128i v) {
    return (__m512i){_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
QK_INLINE __m512i qk_cvtepu8_epi32(__m128i v) {
    return (__m512i){_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
QK_INLINE __m512 qk_cvtph_ps(__m256i v) {
    return (__m512){_mm256_cvtph_ps(QK_LOWER(v)), _mm256_cvtph_ps(QK_UPPER(v))};
}
QK_INLINE __m256i qk_to_half(__m512 v) {
    return _mm256_set_m128i(_mm256_cvtps_ph(v.high, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(v.low, _MM_FROUND_TO_NEAREST_INT));
}
/* Packing works within quarters of the vector, so a permutation restores their order. */
QK_INLINE __m256i qk_pack_words(__m512i v) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(v.low, v.high), 0xD8);
}
QK_INLINE __m128i qk_cvtepi32_epi8(__m512i v) {
    __m256i words = qk_pack_words(qk_and_si512(v, qk_set1_epi32(0xFF)));
    return _mm_packus_epi16(QK_LOWER(words), QK_UPPER(words));
}
QK_INLINE __m128i qk_cvtsepi32_epi8(__m512i v) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), 0xD8);
    return _mm_packs_epi16(QK_LOWER(words), QK_UPPER(words));
}

#define QK_REDUCE(name, type, vector, number, half, quarter, first) \
    QK_INLINE number qk_reduce_##name(type v) { \
        vector both = half(v.low, v.high); \
        __m128 four = quarter(_mm256_castps256_ps128((__m256)both), _mm256_extractf128_ps((__m256)both, 1)); \
        four = quarter(four, _mm_movehl_ps(four, four)); \
        return first(quarter(four, _mm_shuffle_ps(four, four, 1))); \
    }
#define QK_MAX_INTEGERS(a, b) ((__m128)_mm_max_epi32((__m128i)(a), (__m128i)(b)))
#define QK_FIRST_INTEGER(v) _mm_cvtsi128_si32((__m128i)(v))
QK_REDUCE(add_ps, __m512, __m256, float, _mm256_add_ps, _mm_add_ps, _mm_cvtss_f32)
QK_REDUCE(max_ps, __m512, __m256, float, _mm256_max_ps, _mm_max_ps, _mm_cvtss_f32)
QK_REDUCE(min_ps, __m512, __m256, float, _mm256_min_ps, _mm_min_ps, _mm_cvtss_f32)
QK_REDUCE(max_epi32, __m512i, __m256i, int, _mm256_max_epi32, QK_MAX_INTEGERS, QK_FIRST_INTEGER)
