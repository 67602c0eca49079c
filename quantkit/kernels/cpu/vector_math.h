/* Functions of sixteen floats at once, accurate to a few units in the last place unless noted. NaN gives NaN. */
#pragma once
#include "quantkit.h"

/* e^x; 0 below -103, infinity above 88.8. Degree-6 Taylor around the nearest power of two. */
QK_INLINE __m512 qk_exp(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-120.0f), _mm512_min_ps(_mm512_set1_ps(120.0f), x)); /* keeps NaN: 2nd operand */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* tanh x: near zero by a polynomial (Moshier's Cephes library), elsewhere from e^2x. */
QK_INLINE __m512 qk_tanh(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), z = _mm512_mul_ps(x, x);
    __m512 e = qk_exp(_mm512_add_ps(x, x));
    __m512 far = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
    __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(2.06390887954e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-5.37397155531e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(1.33314422036e-1f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-3.33332819422e-1f));
    __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0.625f), _CMP_LT_OQ), far, near);
}

/* erf x, by Abramowitz and Stegun 7.1.26; absolute error 1.5e-7. */
QK_INLINE __m512 qk_erf(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), a = _mm512_abs_ps(x);
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(a, _mm512_set1_ps(0.3275911f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    __m512 e = qk_exp(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), a), a));
    __m512 positive = _mm512_fnmadd_ps(_mm512_mul_ps(p, t), e, one);
    __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(positive, negative, _mm512_setzero_ps(), positive);
}

#if QK_AVX512
/* Sum each of sixteen vectors; lane i of the result is the sum of v[i]. Overwrites v. */
QK_INLINE __m512 qk_sum_each(__m512 *v) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
}
#endif

/* Return the mask of the lanes before `end`, in a vector that starts at `at`. */
QK_INLINE __mmask16 qk_lanes(int64_t at, int64_t end) {
    return end - at >= 16 ? 0xFFFF : end <= at ? 0 : (__mmask16)((1u << (end - at)) - 1);
}
