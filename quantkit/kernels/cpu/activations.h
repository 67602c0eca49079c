/* Load and store sixteen activations under a lane mask: float32, bf16 or fp16 in memory, floats in registers. */
#pragma once
#include "quantkit.h"

enum { QK_F32, QK_BF16, QK_F16 };

QK_INLINE int64_t qk_state_bytes(int type) { return type == QK_F32 ? 4 : 2; }

QK_INLINE __m512 qk_load_state(const void *p, int64_t at, int type, __mmask16 lanes) {
    if (type == QK_F32)
        return _mm512_maskz_loadu_ps(lanes, (const float *)p + at);
    __m256i half = _mm256_maskz_loadu_epi16(lanes, (const uint16_t *)p + at);
    if (type == QK_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

QK_INLINE void qk_store_state(void *p, int64_t at, int type, __mmask16 lanes, __m512 v) {
    if (type == QK_F32) {
        _mm512_mask_storeu_ps((float *)p + at, lanes, v);
        return;
    }
    __m256i half = type == QK_F16 ? _mm512_cvtps_ph(v, 8) : (__m256i)_mm512_cvtneps_pbh(v);
    _mm256_mask_storeu_epi16((uint16_t *)p + at, lanes, half);
}
