/* Shared by the files of this folder. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define QK_EXPORT __attribute__((visibility("default")))
#define QK_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Whether the CPU has products of bf16, and 32 registers of 16 floats. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VBMI__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define QK_BF16 1
#else
#define QK_BF16 0
#endif

/* Whether the compiler supports AMX products of bf16. `qk_has_amx` tells whether the system allows them. */
#if QK_BF16 && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define QK_AMX 1
#else
#define QK_AMX 0
#endif

int qk_has_amx(void);

/* AMX versions of the functions in products.c and fits.c. The second returns 0 and does nothing if it does not support
   the group size or is out of memory. */
void qk_add_products_amx(const uint16_t *left, const uint16_t *right, int64_t left_block, int64_t right_block,
                         int64_t tokens, float *total, int64_t rows, int64_t columns, int64_t lower, int threads);
int qk_normal_equations_amx(const uint16_t *codes, const uint16_t *packed, const uint16_t *hessian, float *normal,
                            int64_t first, int64_t groups, int64_t all, int64_t size, int64_t outputs, int64_t padded,
                            int threads);
