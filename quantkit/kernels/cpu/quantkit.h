/* What all native kernels share: AVX-512 helpers and per-thread scratch memory. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define QK_EXPORT __attribute__((visibility("default")))
#define QK_INLINE static inline __attribute__((always_inline))

/* Memory of the calling thread, 64-byte aligned, at least `bytes` long, contents undefined. Slots are independent; a
   later call with the same slot may move it. NULL when memory is out. */
enum { QK_SLOT_LINEAR_INPUT, QK_SLOT_LINEAR_SCALES, QK_SLOT_LINEAR_SUMS, QK_SLOT_LINEAR_PANEL, QK_SLOT_ATTENTION_A,
       QK_SLOT_ATTENTION_B, QK_NUM_SLOTS };
void *qk_scratch(int slot, size_t bytes);

QK_INLINE int64_t qk_min(int64_t a, int64_t b) { return a < b ? a : b; }
QK_INLINE int64_t qk_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* A bf16 is the upper half of a float. */
QK_INLINE float qk_bf16_to_float(uint16_t bits) {
    union { uint32_t u; float f; } value = {(uint32_t)bits << 16};
    return value.f;
}

QK_INLINE uint16_t qk_float_to_bf16(float value) {
    return (uint16_t)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0);
}

QK_INLINE __m512 qk_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

QK_INLINE void qk_store_bf16(uint16_t *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }
