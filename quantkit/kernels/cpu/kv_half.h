/* Conversion of tokens of any number type to bf16, which holds every code of up to 8 bits exactly; and interleaving of
   tokens in pairs, which the dot product of bf16 pairs needs for values. */
#pragma once
#include "kv.h"
#if QK_AVX512

/* A permutation reads five bits of an index, and the fifth belongs to the upper nibble. The table is stored twice, so
   that this bit does not matter. */
QK_INLINE void kv_dequantize_half_int4(const uint8_t *codes, int64_t width, uint16_t *out, int64_t stride) {
    static const uint16_t bf16[32] __attribute__((aligned(64))) = {
        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150,
        0x4160, 0x4170, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130,
        0x4140, 0x4150, 0x4160, 0x4170};
    __m512i table = _mm512_load_si512(bf16);
    _mm512_storeu_si512(out + stride - 32, _mm512_setzero_si512());
    for (int64_t k = 0; k < width / 2; k += 32) {
        __mmask32 lanes = width / 2 - k >= 32 ? 0xFFFFFFFFu : (1u << (width / 2 - k)) - 1;
        __m512i pair = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, codes + k));
        _mm512_mask_storeu_epi16(out + k, lanes, _mm512_permutexvar_epi16(pair, table));
        _mm512_mask_storeu_epi16(out + width / 2 + k, lanes,
                                 _mm512_permutexvar_epi16(_mm512_srli_epi16(pair, 4), table));
    }
}

QK_INLINE __m512 kv_floats(const uint8_t *codes, int64_t at, int64_t width, int type) {
    __mmask16 lanes = qk_lanes(at, width);
    if (type <= KV_F16)
        return qk_load_state(codes, at, type, lanes);
    __m128i bytes = _mm_maskz_loadu_epi8(lanes, codes + at);
    return type == KV_FP8 ? kv_dequantize_fp8(bytes) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/* Like kv_dequantize_small. */
QK_INLINE void kv_dequantize_half_small(const uint8_t *codes, int64_t width, int type, uint16_t *out, int64_t stride) {
    int64_t quarter = width / 4, run = kv_small_run(width, type);
    _mm512_storeu_si512(out + stride - 32, _mm512_setzero_si512());
    for (int half = 0; half * run < quarter; half++)
        for (int64_t k = 0; k < run; k += 16) {
            __mmask16 lanes = qk_lanes(k, run);
            __m512i low = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, codes + half * run + k)), high = low;
            if (type != KV_TURNED2)
                high = kv_upper_bits(codes, width, k, lanes);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512 numbers = kv_small_codes(low, 2 * j, high, 2 * j + half, type);
                _mm256_mask_storeu_epi16(out + j * quarter + half * run + k, lanes,
                                         (__m256i)_mm512_cvtneps_pbh(numbers));
            }
        }
}

QK_INLINE void kv_dequantize_half(const uint8_t *codes, int64_t token_stride, int64_t tokens, int64_t width, int type,
                              uint16_t *out, int64_t stride) {
    for (int64_t t = 0; t < tokens; t++, codes += token_stride, out += stride) {
        if (type == KV_INT4) {
            kv_dequantize_half_int4(codes, width, out, stride);
            continue;
        }
        if (type > KV_INT4) {
            kv_dequantize_half_small(codes, width, type, out, stride);
            continue;
        }
        for (int64_t k = 0; k < width; k += 32) {
            if (type == KV_BF16) {
                __mmask32 lanes = width - k >= 32 ? 0xFFFFFFFFu : (1u << (width - k)) - 1;
                _mm512_storeu_si512(out + k, _mm512_maskz_loadu_epi16(lanes, codes + 2 * k));
                continue;
            }
            __m512 low = kv_floats(codes, k, width, type), high = kv_floats(codes, k + 16, width, type);
            _mm512_storeu_si512(out + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* Like kv_load, but to bf16; stride is width rounded up to a multiple of 32. */
static inline void kv_load_half(const uint8_t *codes, int64_t token_stride, int64_t tokens, int64_t width, int64_t type,
                                uint16_t *out, int64_t stride) {
    KV_BY_TYPE(kv_dequantize_half)
}

/* Rearrange tokens (tokens, width) as pairs (tokens / 2, width, 2); an odd last token is paired with zeros. */
static inline void kv_pair_tokens(const uint16_t *from, int64_t stride, int64_t tokens, int64_t width, uint16_t *out) {
    uint16_t order[2][32];
    for (int i = 0; i < 32; i++) {
        order[0][i] = (uint16_t)(i / 2 + i % 2 * 32);
        order[1][i] = (uint16_t)(16 + i / 2 + i % 2 * 32);
    }
    __m512i first = _mm512_loadu_si512(order[0]), second = _mm512_loadu_si512(order[1]);
    for (int64_t t = 0; t < tokens; t += 2, from += 2 * stride, out += 2 * width)
        for (int64_t k = 0; k < width; k += 32) {
            __m512i a = _mm512_loadu_si512(from + k);
            __m512i b = t + 1 < tokens ? _mm512_loadu_si512(from + stride + k) : _mm512_setzero_si512();
            _mm512_storeu_si512(out + 2 * k, _mm512_permutex2var_epi16(a, first, b));
            _mm512_storeu_si512(out + 2 * k + 32, _mm512_permutex2var_epi16(a, second, b));
        }
}
#endif
