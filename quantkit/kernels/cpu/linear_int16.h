/* The products of linear_segment.h with inputs in int16, for AVX2: one instruction multiplies sixteen codes by inputs
   and adds pairs of products, and codes need no conversion to floats. Each run of at most 64 inputs has its own step,
   so an input changes by at most 1/65534 of the largest of the run; a run of inputs below 2^-100 becomes 0. A run has at
   most 64 products below 240 * 2^15, so its sum fits in 32 bits. */
#pragma once

/* Round `count` inputs, at most 64, to codes; returns the value of code 1. sum: set to the sum of the codes. An input
   that is NaN or infinite makes the value NaN, and with it the token's results. step: given value of code 1, if the
   inputs are multiples of it; 0: it is chosen. */
static float round_run(const float *x, int64_t count, float step, int16_t *codes, float *sum) {
    __m512 values[4], most = _mm512_setzero_ps(), bad = _mm512_setzero_ps();
    __m512i all = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        __m512 v = values[i / 16] = _mm512_maskz_loadu_ps(mask, x + i);
        most = _mm512_max_ps(_mm512_abs_ps(v), most);
        bad = _mm512_fmadd_ps(v, _mm512_setzero_ps(), bad);
    }
    float largest = _mm512_reduce_max_ps(most);
    float factor = step ? 1 / step : largest > 0x1p-100f ? 32767 / largest : 0; /* 32767 / 2^-140 is infinite */
    for (int64_t i = 0; i < count; i += 16) {
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values[i / 16], _mm512_set1_ps(factor)));
        all = _mm512_add_epi32(all, rounded);
        _mm256_mask_storeu_epi16(codes + i, count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1),
                                 qk_pack_words(_mm512_and_si512(rounded, _mm512_set1_epi32(0xffff))));
    }
    *sum = _mm512_reduce_add_ps(_mm512_cvtepi32_ps(all));
    return (step ? step : factor ? largest / 32767 : 0) + _mm512_reduce_add_ps(bad);
}

/* Load block b of one pair of inputs as words (e, o). QK_W4: code + 8, in odd blocks 16 times as large. */
QK_INLINE __m512i load_words(int storage, const uint8_t *w, int b) {
    if (storage == QK_W4) {
        __m512i codes = _mm512_loadu_si512(w);
        return _mm512_and_si512(b < 2 ? codes : qk_srli_epi16(codes, 8), _mm512_set1_epi32(b % 2 ? 0xf000f0 : 0xf000f));
    }
    __m512i codes = _mm512_loadu_si512(w + 64 * (b / 2));
    return qk_srai_epi16(b % 2 ? codes : qk_slli_epi16(codes, 8), 8);
}

QK_INLINE void integer_blocks(int storage, int tokens, int first, int blocks, const uint8_t *w, const int16_t *x,
                              int64_t stride, int64_t pairs, const Factors *factors, float *main) {
    __m512i whole[MAX_TOKENS][4];
    __m512 sum[MAX_TOKENS][4];
    UNROLL for (int m = 0; m < tokens; m++)
        UNROLL for (int b = 0; b < blocks; b++) whole[m][b] = _mm512_setzero_si512();
    for (int64_t p = 0; p < pairs; p++, w += PAIR_BYTES[storage])
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512i v = load_words(storage, w, first + b);
            UNROLL for (int m = 0; m < tokens; m++) {
                int32_t pair;
                memcpy(&pair, x + m * stride + 2 * p, sizeof(pair));
                QK_ADD_TO(whole[m][b], qk_madd_epi16(v, _mm512_set1_epi32(pair)));
            }
        }
    UNROLL for (int m = 0; m < tokens; m++)
        UNROLL for (int b = 0; b < blocks; b++) {
            float unit = factors->units[m * factors->stride];
            if (storage == QK_W4 && (first + b) % 2) unit *= 0x1p-4f;
            sum[m][b] = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[m][b]), _mm512_set1_ps(unit));
        }
    finish_segment(tokens, first, blocks, sum, factors, main);
}

QK_INLINE void segment_i16(int storage, int tokens, const uint8_t *w, const int16_t *x, int64_t stride, int64_t pairs,
                           const Factors *factors, float *main) {
    const int blocks = tokens == 1 ? 4 : tokens == 2 ? 2 : 1;
    for (int first = 0; first < 4; first += blocks)
        integer_blocks(storage, tokens, first, blocks, w, x, stride, pairs, factors, main);
}
