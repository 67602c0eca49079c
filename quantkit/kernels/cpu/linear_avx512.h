/* Conversion of codes to numbers, and the products of `linear_segment.h`, with AVX-512: pairs of bf16, 32 registers. */
#pragma once

/* bf16 of -8..7, stored twice: vpermw reads five bits of a word, and the highest of these belongs to the next
   nibble. */
static const uint16_t INT4_VALUES[32] __attribute__((aligned(64))) = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
    0x4080, 0x40a0, 0x40c0, 0x40e0};
/* bf16 of the e4m3 subnormals m * 2^-9. */
static const uint16_t FP8_SUBNORMALS[32] __attribute__((aligned(64))) = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                                       0x3c00, 0x3c20, 0x3c40, 0x3c60};

/* Convert e4m3 codes in the low bytes of words to bf16: move the exponent and raise its bias by 120. */
QK_INLINE __m512i fp8_words(__m512i v, __m512i table) {
    __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(v, 4), _mm512_set1_epi16(0x07f0));
    magnitude = _mm512_add_epi16(magnitude, _mm512_set1_epi16(0x3c00));
    __mmask32 subnormal = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x0078));
    magnitude = _mm512_mask_permutexvar_epi16(magnitude, subnormal, v, table);
    /* (v << 8 & 0x8000) | magnitude */
    return _mm512_ternarylogic_epi32(_mm512_slli_epi16(v, 8), _mm512_set1_epi16((short)0x8000), magnitude, 0xea);
}

/* Lower and upper bytes of m + 1/2 in bf16, for m = 0..127. */
static uint8_t HALVES[2][128] __attribute__((aligned(64)));

__attribute__((constructor)) static void fill_halves(void) {
    for (int m = 0; m < 128; m++) {
        union { float f; uint32_t u; } value = {(float)m + 0.5f};
        HALVES[0][m] = (uint8_t)(value.u >> 16);
        HALVES[1][m] = (uint8_t)(value.u >> 24);
    }
}

/* Convert two blocks of QK_H8 codes to bf16 words. */
QK_INLINE void half_words(__m512i codes, const __m512i table[4], __m512i v[2]) {
    __m512i low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
    __m512i high = _mm512_permutex2var_epi8(table[2], codes, table[3]);
    high = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8((char)0x80), high, 0xea); /* (codes & 0x80) | high */
    v[0] = _mm512_unpacklo_epi8(low, high);
    v[1] = _mm512_unpackhi_epi8(low, high);
}

/* Load one pair of inputs of a panel as bf16 words, [block][lane][e, o]. */
QK_INLINE void load_pair(int storage, const uint8_t *w, const __m512i table[4], __m512i v[4]) {
    if (storage == QK_BF16)
        UNROLL for (int b = 0; b < 4; b++) v[b] = _mm512_loadu_si512(w + 64 * b);
    if (storage == QK_W4) {
        __m512i codes = _mm512_loadu_si512(w);
        v[0] = _mm512_permutexvar_epi16(codes, table[0]);
        v[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table[0]);
        v[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table[0]);
        v[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table[0]);
    }
    if (storage == QK_H8)
        for (int half = 0; half < 2; half++) half_words(_mm512_loadu_si512(w + 64 * half), table, v + 2 * half);
    if (storage == QK_FP8)
        for (int half = 0; half < 2; half++) {
            __m512i codes = _mm512_loadu_si512(w + 64 * half);
            v[2 * half] = fp8_words(codes, table[0]);
            v[2 * half + 1] = fp8_words(_mm512_srli_epi16(codes, 8), table[0]);
        }
}

QK_INLINE void load_table(int storage, __m512i table[4]) {
    if (storage == QK_W4) table[0] = _mm512_load_si512(INT4_VALUES);
    if (storage == QK_FP8) table[0] = _mm512_load_si512(FP8_SUBNORMALS);
    if (storage == QK_H8)
        for (int i = 0; i < 4; i++) table[i] = _mm512_load_si512(HALVES[i / 2] + 64 * (i % 2));
}

/* Load one pair of inputs of a panel as floats, v[e, o][block]. */
QK_INLINE void load_pair_f32(int storage, const uint8_t *w, const __m512i table[4], __m512 v[2][4]) {
    if (storage == QK_F32) {
        for (int i = 0; i < 8; i++) v[i / 4][i % 4] = _mm512_loadu_ps((const float *)w + 16 * i);
        return;
    }
    if (storage == QK_F16) {
        for (int i = 0; i < 8; i++)
            v[i / 4][i % 4] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + 32 * i)));
        return;
    }
    if (storage == QK_W8) {
        for (int half = 0; half < 2; half++) {
            __m512i c = _mm512_loadu_si512(w + 64 * half);
            v[0][2 * half] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(c, 24), 24));
            v[0][2 * half + 1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(c, 16), 24));
            v[1][2 * half] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(c, 8), 24));
            v[1][2 * half + 1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(c, 24));
        }
        return;
    }
    __m512i words[4];
    load_pair(storage, w, table, words);
    UNROLL for (int b = 0; b < 4; b++) {
        v[0][b] = _mm512_castsi512_ps(_mm512_slli_epi32(words[b], 16));
        v[1][b] = _mm512_castsi512_ps(_mm512_and_si512(words[b], _mm512_set1_epi32((int)0xffff0000)));
    }
}

/* Beginning of both segments: load the table of the storage type, and set the sums to zero. */
#define START_SEGMENT(storage, tokens) \
    __m512i table[4]; \
    load_table(storage, table); \
    __m512 sum[MAX_TOKENS][4]; \
    UNROLL for (int m = 0; m < tokens; m++) \
        UNROLL for (int b = 0; b < 4; b++) \
            sum[m][b] = _mm512_setzero_ps();

QK_INLINE void segment_bf16(int storage, int tokens, const uint8_t *w, const uint16_t *x, int64_t stride, int64_t pairs,
                            const Factors *factors, float *main) {
    START_SEGMENT(storage, tokens)
    for (int64_t p = 0; p < pairs; p++, w += PAIR_BYTES[storage]) {
        __m512i v[4];
        fetch_next(storage, w, factors);
        load_pair(storage, w, table, v);
        UNROLL for (int m = 0; m < tokens; m++) {
            int32_t both;
            memcpy(&both, x + m * stride + 2 * p, 4);
            __m512i input = _mm512_set1_epi32(both);
            UNROLL for (int b = 0; b < 4; b++) sum[m][b] = _mm512_dpbf16_ps(sum[m][b], (__m512bh)v[b], (__m512bh)input);
        }
    }
    finish_segment(tokens, 0, 4, sum, factors, main);
}

QK_INLINE void segment_f32(int storage, int tokens, const uint8_t *w, const float *x, int64_t stride, int64_t pairs,
                           const Factors *factors, float *main) {
    START_SEGMENT(storage, tokens)
    for (int64_t p = 0; p < pairs; p++, w += PAIR_BYTES[storage]) {
        __m512 v[2][4];
        fetch_next(storage, w, factors);
        if (storage != QK_F32) load_pair_f32(storage, w, table, v);
        for (int i = 0; i < 2; i++) {
            if (storage == QK_F32)
                UNROLL for (int b = 0; b < 4; b++) {
                    v[i][b] = _mm512_loadu_ps((const float *)w + 64 * i + 16 * b);
                    __asm__("" : "+v"(v[i][b])); /* keep in a register: GCC would load it again for every token */
                }
            UNROLL for (int m = 0; m < tokens; m++) {
                __m512 input = _mm512_set1_ps(x[m * stride + 2 * p + i]);
                UNROLL for (int b = 0; b < 4; b++) sum[m][b] = _mm512_fmadd_ps(v[i][b], input, sum[m][b]);
            }
        }
    }
    finish_segment(tokens, 0, 4, sum, factors, main);
}
