/* What these files share. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define QK_EXPORT __attribute__((visibility("default")))
#define QK_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Whether there are products of bf16, and 32 registers of 16 floats. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VBMI__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define QK_BF16 1
#else
#define QK_BF16 0
#endif
