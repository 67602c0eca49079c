/* Quantize inputs at run time with one symmetric scale per token, as kernels.reference.ops.quantize_tokens does. */
#include "linear.h"
#include <float.h>

QK_INLINE __m512 load(const void *x, int is_bf16, int64_t i, __mmask16 mask) {
    if (!is_bf16) return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
    __m256i words = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

QK_INLINE __mmask16 lanes_of(int64_t left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

/* Return the scale of a row; NaN if the row holds a NaN or an infinity, so that every result of the row becomes NaN. */
QK_INLINE float row_scale(const void *x, int is_bf16, int64_t k, float half_range) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512(); /* compared as integers: a NaN is larger than every number */
    for (int64_t i = 0; i < k; i += 16) {
        __m512 v = load(x, is_bf16, i, lanes_of(k - i));
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(v), magnitude));
    }
    union { int32_t i; float f; } largest = {_mm512_reduce_max_epi32(most)};
    if (largest.i >= 0x7f800000) return NAN;
    float scale = largest.f / half_range;
    return scale > 0 ? scale : FLT_EPSILON;
}

QK_INLINE void int8_codes(const void *x, int is_bf16, int64_t k, int8_t *codes, float scale) {
    const __m512 step = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < k; i += 16) {
        __mmask16 mask = lanes_of(k - i);
        __m512i rounded = _mm512_cvtps_epi32(_mm512_div_ps(load(x, is_bf16, i, mask), step));
        _mm_mask_storeu_epi8(codes + i, mask, _mm512_cvtsepi32_epi8(rounded));
    }
}

float qk_quantize_int8(const void *x, int is_bf16, int64_t k, int64_t padded, int8_t *codes) {
    float scale = is_bf16 ? row_scale(x, 1, k, 127.5f) : row_scale(x, 0, k, 127.5f);
    memset(codes + k, 0, (size_t)(padded - k));
    if (isnan(scale)) memset(codes, 0, (size_t)k);
    else if (is_bf16) int8_codes(x, 1, k, codes, scale);
    else int8_codes(x, 0, k, codes, scale);
    return scale;
}

/* Round to the nearest e4m3 value, ties to even; |v| <= 448. */
QK_INLINE __m512 round_fp8(__m512 v) {
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7ffff)), odd);
    __m512 normal = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xfff00000)));
    __m512 fine = _mm512_roundscale_ps(v, 0x98); /* multiples of 2^-9, nearest even, no exceptions */
    __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(normal, small, fine);
}

float qk_quantize_bf16(const void *x, int is_bf16, int64_t k, int64_t padded, int activation, uint16_t *codes) {
    const __m512 low = _mm512_set1_ps(activation == QK_TO_INT8 ? -128.f : -448.f);
    const __m512 high = _mm512_set1_ps(activation == QK_TO_INT8 ? 127.f : 448.f);
    float scale = row_scale(x, is_bf16, k, activation == QK_TO_INT8 ? 127.5f : 448.f);
    memset(codes + k, 0, (size_t)(padded - k) * 2);
    if (isnan(scale)) {
        memset(codes, 0, (size_t)k * 2);
        return scale;
    }
    for (int64_t i = 0; i < k; i += 16) {
        __mmask16 mask = lanes_of(k - i);
        __m512 v = _mm512_div_ps(load(x, is_bf16, i, mask), _mm512_set1_ps(scale));
        if (activation == QK_TO_INT8) v = _mm512_roundscale_ps(v, 0x08);
        v = _mm512_min_ps(_mm512_max_ps(v, low), high);
        if (activation == QK_TO_FP8) v = round_fp8(v);
        _mm256_mask_storeu_epi16(codes + i, mask, (__m256i)_mm512_cvtneps_pbh(v));
    }
    return scale;
}
