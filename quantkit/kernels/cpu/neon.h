/* The vectors of emulated.h as four NEON vectors, and what its instructions do on aarch64. At the end, the few AVX and
   SSE instructions that the kernels name. All results have the bits that avx2.h gives.

   Only quantkit.h includes this file. In this folder, a __m256i always holds sixteen words, and a __m128i bytes. */
#pragma once
#include <arm_neon.h>

typedef struct { float32x4_t a, b, c, d; } __m512;
typedef struct { uint32x4_t a, b, c, d; } __m512i;
typedef struct { float32x4_t low, high; } __m256;
typedef struct { uint16x8_t low, high; } __m256i;
typedef uint8x16_t __m128i;
typedef uint16_t __mmask16;

/* In memory: not aligned, and of any type, as for the instructions of x86. */
typedef float32x4_t qk_floats __attribute__((may_alias, aligned(1)));
typedef uint16x8_t qk_words __attribute__((may_alias, aligned(1)));

/* ---- lane by lane, the same for all four parts ---- */

#define QK_ONE(name, from, to, part) \
    QK_INLINE to qk_##name(from v) { return (to){part(v.a), part(v.b), part(v.c), part(v.d)}; }
#define QK_TWO(name, type, part) \
    QK_INLINE type qk_##name(type v, type w) { \
        return (type){part(v.a, w.a), part(v.b, w.b), part(v.c, w.c), part(v.d, w.d)}; \
    }
#define QK_THREE(name, part) \
    QK_INLINE __m512 qk_##name(__m512 v, __m512 w, __m512 x) { \
        return (__m512){part(v.a, w.a, x.a), part(v.b, w.b, x.b), part(v.c, w.c, x.c), part(v.d, w.d, x.d)}; \
    }
#define QK_SHIFT(name, type, operator) \
    QK_INLINE __m512i qk_##name(__m512i v, int count) { \
        return (__m512i){(uint32x4_t)((type)v.a operator count), (uint32x4_t)((type)v.b operator count), \
                         (uint32x4_t)((type)v.c operator count), (uint32x4_t)((type)v.d operator count)}; \
    }

#define QK_COMPARE(name, type, part) \
    QK_INLINE __m512i qk_##name(type v, type w) { \
        return (__m512i){part(v.a, w.a), part(v.b, w.b), part(v.c, w.c), part(v.d, w.d)}; \
    }

/* As on x86: the second operand if one is NaN. */
#define QK_LARGER(v, w) vbslq_f32(vcgtq_f32(v, w), v, w)
#define QK_SMALLER(v, w) vbslq_f32(vcltq_f32(v, w), v, w)
#define QK_LARGER_INTEGER(v, w) ((uint32x4_t)vmaxq_s32((int32x4_t)(v), (int32x4_t)(w)))
#define QK_FMADD(v, w, x) vfmaq_f32(x, v, w)
#define QK_FMSUB(v, w, x) vfmaq_f32(vnegq_f32(x), v, w)
#define QK_FNMADD(v, w, x) vfmsq_f32(x, v, w)
#define QK_FROM_INTEGER(v) vcvtq_f32_s32((int32x4_t)(v))
#define QK_TO_INTEGER(v) ((uint32x4_t)vcvtnq_s32_f32(v))
QK_TWO(add_ps, __m512, vaddq_f32)
QK_TWO(sub_ps, __m512, vsubq_f32)
QK_TWO(mul_ps, __m512, vmulq_f32)
QK_TWO(div_ps, __m512, vdivq_f32)
QK_TWO(max_ps, __m512, QK_LARGER)
QK_TWO(min_ps, __m512, QK_SMALLER)
QK_TWO(and_si512, __m512i, vandq_u32)
QK_TWO(or_si512, __m512i, vorrq_u32)
QK_TWO(add_epi32, __m512i, vaddq_u32)
QK_TWO(sub_epi32, __m512i, vsubq_u32)
QK_TWO(mullo_epi32, __m512i, vmulq_u32)
QK_TWO(max_epi32, __m512i, QK_LARGER_INTEGER)
QK_THREE(fmadd_ps, QK_FMADD)
QK_THREE(fmsub_ps, QK_FMSUB)
QK_THREE(fnmadd_ps, QK_FNMADD)
QK_SHIFT(slli_epi32, uint32x4_t, <<)
QK_SHIFT(srli_epi32, uint32x4_t, >>)
QK_SHIFT(srai_epi32, int32x4_t, >>)
QK_ONE(castps_si512, __m512, __m512i, vreinterpretq_u32_f32)
QK_ONE(castsi512_ps, __m512i, __m512, vreinterpretq_f32_u32)
QK_ONE(cvtepi32_ps, __m512i, __m512, QK_FROM_INTEGER)
QK_ONE(cvtps_epi32, __m512, __m512i, QK_TO_INTEGER)
QK_ONE(round_ps, __m512, __m512, vrndnq_f32)

QK_INLINE __m512 qk_set1_ps(float value) {
    float32x4_t v = vdupq_n_f32(value);
    return (__m512){v, v, v, v};
}
QK_INLINE __m512i qk_set1_epi32(int value) {
    uint32x4_t v = vdupq_n_u32((uint32_t)value);
    return (__m512i){v, v, v, v};
}

/* Keep a vector in registers: GCC would load floats again for every use. */
#define QK_KEEP(v) __asm__("" : "+w"((v).a), "+w"((v).b), "+w"((v).c), "+w"((v).d))

/* ---- memory ---- */

QK_INLINE __m512 qk_loadu_ps(const void *p) {
    const qk_floats *from = (const qk_floats *)p;
    return (__m512){from[0], from[1], from[2], from[3]};
}
QK_INLINE void qk_storeu_ps(void *p, __m512 v) {
    qk_floats *to = (qk_floats *)p;
    to[0] = v.a, to[1] = v.b, to[2] = v.c, to[3] = v.d;
}
QK_INLINE __m512i qk_loadu_si512(const void *p) { return qk_castps_si512(qk_loadu_ps(p)); }

QK_INLINE __m512 qk_maskz_loadu_ps(__mmask16 mask, const float *p) {
    if (mask == 0xFFFF) return qk_loadu_ps(p);
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)__builtin_popcount(mask) * sizeof(float));
    return qk_loadu_ps(lanes);
}
QK_INLINE void qk_mask_storeu_ps(float *p, __mmask16 mask, __m512 v) {
    float lanes[16];
    qk_storeu_ps(mask == 0xFFFF ? p : lanes, v);
    if (mask != 0xFFFF) memcpy(p, lanes, (size_t)__builtin_popcount(mask) * sizeof(float));
}

/* ---- masks ---- */

/* Expand the lowest four bits to four lanes of all ones or all zeros. */
QK_INLINE uint32x4_t qk_spread_mask(unsigned bits) {
    return vtstq_u32(vdupq_n_u32(bits), (uint32x4_t){1, 2, 4, 8});
}
/* Return a mask of the lanes that are all ones; the other lanes are all zeros. */
QK_INLINE __mmask16 qk_gather_mask(__m512i v) {
    uint32x4_t bits = {1, 2, 4, 8};
    return (__mmask16)vaddvq_u32((v.a & bits) | (v.b & bits << 4) | (v.c & bits << 8) | (v.d & bits << 12));
}

/* Return the lanes of w where the mask is set, and the lanes of v elsewhere. */
QK_INLINE __m512 qk_blend(__mmask16 mask, __m512 v, __m512 w) {
    return (__m512){vbslq_f32(qk_spread_mask(mask), w.a, v.a), vbslq_f32(qk_spread_mask(mask >> 4u), w.b, v.b),
                    vbslq_f32(qk_spread_mask(mask >> 8u), w.c, v.c), vbslq_f32(qk_spread_mask(mask >> 12u), w.d, v.d)};
}

QK_COMPARE(less, __m512, vcltq_f32)
QK_COMPARE(equal, __m512, vceqq_f32)
QK_COMPARE(below, __m512i, vcltq_u32)
enum { _CMP_LT_OQ, _CMP_UNORD_Q };
QK_INLINE __mmask16 _mm512_cmp_ps_mask(__m512 v, __m512 w, int how) {
    __m512i lanes = how == _CMP_LT_OQ ? qk_less(v, w) : qk_and_si512(qk_equal(v, v), qk_equal(w, w));
    return (__mmask16)(how == _CMP_LT_OQ ? qk_gather_mask(lanes) : ~qk_gather_mask(lanes));
}
QK_INLINE __mmask16 qk_cmplt_epu32_mask(__m512i v, __m512i w) {
    return qk_gather_mask(qk_below(v, w));
}
QK_INLINE __mmask16 _mm_cmpeq_epi8_mask(__m128i v, __m128i w) {
    uint8x16_t bits = vceqq_u8(v, w) & (uint8x16_t){1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (__mmask16)(vaddv_u8(vget_low_u8(bits)) | vaddv_u8(vget_high_u8(bits)) << 8);
}

/* ---- conversions between number types ---- */

QK_INLINE __m512i qk_cvtepu16_epi32(__m256i v) {
    return (__m512i){vmovl_u16(vget_low_u16(v.low)), vmovl_high_u16(v.low), vmovl_u16(vget_low_u16(v.high)),
                     vmovl_high_u16(v.high)};
}
QK_INLINE __m256i _mm256_cvtepu8_epi16(__m128i v) { return (__m256i){vmovl_u8(vget_low_u8(v)), vmovl_high_u8(v)}; }
QK_INLINE __m512i qk_cvtepu8_epi32(__m128i v) { return qk_cvtepu16_epi32(_mm256_cvtepu8_epi16(v)); }
QK_INLINE __m512i qk_cvtepi8_epi32(__m128i v) {
    int16x8_t low = vmovl_s8(vget_low_s8((int8x16_t)v)), high = vmovl_high_s8((int8x16_t)v);
    return (__m512i){(uint32x4_t)vmovl_s16(vget_low_s16(low)), (uint32x4_t)vmovl_high_s16(low),
                     (uint32x4_t)vmovl_s16(vget_low_s16(high)), (uint32x4_t)vmovl_high_s16(high)};
}
QK_INLINE __m512 qk_cvtph_ps(__m256i v) {
    float16x8_t low = vreinterpretq_f16_u16(v.low), high = vreinterpretq_f16_u16(v.high);
    return (__m512){vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                    vcvt_high_f32_f16(high)};
}
QK_INLINE __m256i qk_to_half(__m512 v) {
    return (__m256i){vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b)),
                     vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.c), v.d))};
}
QK_INLINE __m256i qk_pack_words(__m512i v) {
    return (__m256i){vmovn_high_u32(vmovn_u32(v.a), v.b), vmovn_high_u32(vmovn_u32(v.c), v.d)};
}
QK_INLINE __m128i qk_cvtepi32_epi8(__m512i v) {
    __m256i words = qk_pack_words(v);
    return vmovn_high_u16(vmovn_u16(words.low), words.high);
}
QK_INLINE __m128i qk_cvtsepi32_epi8(__m512i v) {
    int16x8_t low = vqmovn_high_s32(vqmovn_s32((int32x4_t)v.a), (int32x4_t)v.b);
    int16x8_t high = vqmovn_high_s32(vqmovn_s32((int32x4_t)v.c), (int32x4_t)v.d);
    return (__m128i)vqmovn_high_s16(vqmovn_s16(low), high);
}

/* ---- reductions, in the order of avx2.h ---- */

#define QK_REDUCE(name, type, vector, number, part, move) \
    QK_INLINE number qk_reduce_##name(type v) { \
        vector four = part(part(v.a, v.c), part(v.b, v.d)); \
        four = part(four, move(four, four, 2)); \
        return (number)part(four, move(four, four, 1))[0]; \
    }
QK_REDUCE(add_ps, __m512, float32x4_t, float, vaddq_f32, vextq_f32)
QK_REDUCE(max_ps, __m512, float32x4_t, float, QK_LARGER, vextq_f32)
QK_REDUCE(min_ps, __m512, float32x4_t, float, QK_SMALLER, vextq_f32)
QK_REDUCE(max_epi32, __m512i, uint32x4_t, int, QK_LARGER_INTEGER, vextq_u32)

/* ---- shorter vectors, and hints ---- */

#define _mm_setzero_si128() vdupq_n_u8(0)
#define _mm_set1_epi8(value) vdupq_n_u8((uint8_t)(value))
#define _mm_and_si128 vandq_u8
#define _mm_loadu_si128(p) vld1q_u8((const uint8_t *)(p))
#define _mm_storeu_si128(p, v) vst1q_u8((uint8_t *)(p), v)
#define _mm_storeu_ps(p, v) (*(qk_floats *)(p) = (v))

QK_INLINE __m256i _mm256_loadu_si256(const __m256i *p) {
    const qk_words *from = (const qk_words *)p;
    return (__m256i){from[0], from[1]};
}
QK_INLINE void _mm256_storeu_si256(__m256i *p, __m256i v) {
    qk_words *to = (qk_words *)p;
    to[0] = v.low, to[1] = v.high;
}
QK_INLINE __m256i _mm256_set1_epi16(int value) {
    uint16x8_t v = vdupq_n_u16((uint16_t)value);
    return (__m256i){v, v};
}
QK_INLINE __m256i _mm256_and_si256(__m256i v, __m256i w) { return (__m256i){v.low & w.low, v.high & w.high}; }
QK_INLINE __m256i _mm256_slli_epi16(__m256i v, int count) { return (__m256i){v.low << count, v.high << count}; }
QK_INLINE __m256i _mm256_srai_epi16(__m256i v, int count) {
    return (__m256i){(uint16x8_t)((int16x8_t)v.low >> count), (uint16x8_t)((int16x8_t)v.high >> count)};
}
#define _mm256_extract_epi16(v, lane) ((v).low[lane]) /* only for lanes 0 to 7 */

QK_INLINE __m256 _mm256_setzero_ps(void) { return (__m256){vdupq_n_f32(0), vdupq_n_f32(0)}; }
QK_INLINE __m256 _mm256_loadu_ps(const float *p) {
    return (__m256){((const qk_floats *)p)[0], ((const qk_floats *)p)[1]};
}
QK_INLINE void _mm256_storeu_ps(float *p, __m256 v) {
    ((qk_floats *)p)[0] = v.low, ((qk_floats *)p)[1] = v.high;
}
QK_INLINE __m256 _mm256_add_ps(__m256 v, __m256 w) { return (__m256){v.low + w.low, v.high + w.high}; }
QK_INLINE __m256 _mm256_fmadd_ps(__m256 v, __m256 w, __m256 x) {
    return (__m256){vfmaq_f32(x.low, v.low, w.low), vfmaq_f32(x.high, v.high, w.high)};
}
QK_INLINE __m256 _mm256_hadd_ps(__m256 v, __m256 w) {
    return (__m256){vpaddq_f32(v.low, w.low), vpaddq_f32(v.high, w.high)};
}
/* Only for 0x20, both lower halves, and 0x31, both upper halves. */
QK_INLINE __m256 _mm256_permute2f128_ps(__m256 v, __m256 w, int which) {
    return which == 0x20 ? (__m256){v.low, w.low} : (__m256){v.high, w.high};
}
#define _mm256_castps256_ps128(v) ((v).low)
#define _mm256_extractf128_ps(v, half) ((half) ? (v).high : (v).low)

#define _mm_prefetch(p, level) __builtin_prefetch(p)
#define _mm_pause() __asm__ volatile("isb") /* takes some tens of cycles, as on x86; `yield` takes one on most CPUs */
