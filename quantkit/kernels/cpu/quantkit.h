/* Shared by all kernels of this folder: vectors of sixteen lanes, and scratch memory of each thread. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define QK_EXPORT __attribute__((visibility("default")))
#define QK_INLINE static inline __attribute__((always_inline))

/* Whether the CPU has products of bf16 and of bytes, and 32 registers of 16 floats. Otherwise, everything is computed
   in floats, with AVX2 or NEON. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VBMI__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define QK_AVX512 1
#else
#define QK_AVX512 0
#ifdef __aarch64__
#include "neon.h"
#else
#include "avx2.h"
#endif
#include "emulated.h"
#endif

/* Return memory of the calling thread: 64-byte aligned, at least `bytes` long, with undefined contents. Slots are
   independent. A later call with the same slot may move the memory. Returns NULL if out of memory. */
enum { QK_SLOT_LINEAR_INPUT, QK_SLOT_LINEAR_FLOATS, QK_SLOT_LINEAR_SCALES, QK_SLOT_LINEAR_INT16, QK_SLOT_LINEAR_UNITS,
       QK_SLOT_LINEAR_SUMS, QK_SLOT_LINEAR_PANEL, QK_SLOT_LINEAR_TILES, QK_SLOT_ATTENTION_A, QK_SLOT_ATTENTION_B,
       QK_NUM_SLOTS };
void *qk_scratch(int slot, size_t bytes);

QK_INLINE int64_t qk_min(int64_t a, int64_t b) { return a < b ? a : b; }
QK_INLINE int64_t qk_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Items first..last, without last. `qk_share` returns share `number` of `count` items. */
typedef struct { int64_t first, last; } QkRange;
QK_INLINE QkRange qk_share(int64_t count, int number, int shares) {
    return (QkRange){count * number / shares, count * (number + 1) / shares};
}

/* A bf16 is the upper half of a float. */
QK_INLINE float qk_bf16_to_float(uint16_t bits) {
    union { uint32_t u; float f; } value = {(uint32_t)bits << 16};
    return value.f;
}

QK_INLINE __m512 qk_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

QK_INLINE void qk_store_bf16(uint16_t *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }
