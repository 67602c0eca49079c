/* Conversion of codes to numbers, and the products of `linear_segment.h`, with AVX2 or NEON. Everything is computed in
   floats. 16 registers of 8 floats (NEON: 32 of 4) hold the sums, which limits how many blocks of a panel are
   multiplied at once. */
#pragma once

/* Up to this many tokens, two blocks are multiplied at once. NEON multiplies no vectors in memory, so the values and an
   input need registers too. */
#ifdef __aarch64__
enum { QK_TWO_BLOCKS = 2 };
#else
enum { QK_TWO_BLOCKS = 3 };
#endif

/* Factors on the sums of QK_W4. `load_values` loads block b of one pair of inputs (e, o), and leaves QK_W4 codes at
   their place in the word, where they are 16^b times too large. */
static const float UNITS[4] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f};

QK_INLINE void load_values(int storage, const uint8_t *w, int b, __m512 v[2]) {
    __m512i upper = _mm512_set1_epi32((int)0xffff0000), codes;
    int to_top = 24 - 8 * (b % 2); /* shift that moves an 8-bit code of e to the top; o is 16 bits higher */
    switch (storage) {
    case QK_F32:
    case QK_F16:
        for (int i = 0; i < 2; i++)
            v[i] = storage == QK_F32 ? _mm512_loadu_ps((const float *)w + 64 * i + 16 * b)
                                     : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + 128 * i + 32 * b)));
        break;
    case QK_BF16:
        codes = _mm512_loadu_si512(w + 64 * b);
        v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(codes, 16));
        v[1] = _mm512_castsi512_ps(_mm512_and_si512(codes, upper));
        break;
    case QK_W4:
        codes = _mm512_loadu_si512(w);
        for (int i = 0; i < 2; i++) {
            __m512i own = _mm512_and_si512(i ? _mm512_srli_epi32(codes, 16) : codes, _mm512_set1_epi32(15 << 4 * b));
            v[i] = _mm512_sub_ps(_mm512_cvtepi32_ps(own), _mm512_set1_ps((float)(8 << 4 * b)));
        }
        break;
    default:
        codes = _mm512_loadu_si512(w + 64 * (b / 2));
        for (int i = 0; i < 2; i++) {
            __m512i top = _mm512_slli_epi32(codes, to_top - 16 * i);
            if (storage == QK_W8) {
                v[i] = _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24));
            } else { /* an e4m3 exponent in the place of a float's is 120 too small */
                __m512i bits = _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32((int)0x87f00000));
                v[i] = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
            }
        }
    }
}

QK_INLINE void segment_blocks(int storage, int tokens, int first, int blocks, const uint8_t *w, const float *x,
                              int64_t stride, int64_t pairs, const Factors *factors, float *main) {
    __m512 sum[MAX_TOKENS][4];
    UNROLL for (int m = 0; m < tokens; m++)
        UNROLL for (int b = 0; b < blocks; b++) sum[m][b] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++, w += PAIR_BYTES[storage]) {
        fetch_next(storage, w, factors);
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512 v[2];
            load_values(storage, w, first + b, v);
            UNROLL for (int i = 0; i < 2; i++) QK_KEEP(v[i]);
            UNROLL for (int i = 0; i < 2; i++)
                UNROLL for (int m = 0; m < tokens; m++)
                    sum[m][b] = _mm512_fmadd_ps(v[i], _mm512_set1_ps(x[m * stride + 2 * p + i]), sum[m][b]);
        }
    }
    if (storage == QK_W4)
        UNROLL for (int m = 0; m < tokens; m++)
            UNROLL for (int b = 0; b < blocks; b++)
                sum[m][b] = _mm512_mul_ps(sum[m][b], _mm512_set1_ps(UNITS[first + b]));
    finish_segment(tokens, first, blocks, sum, factors, main);
}

QK_INLINE void segment_f32(int storage, int tokens, const uint8_t *w, const float *x, int64_t stride, int64_t pairs,
                           const Factors *factors, float *main) {
    const int blocks = tokens == 1 ? 4 : tokens <= QK_TWO_BLOCKS ? 2 : 1;
    for (int first = 0; first < 4; first += blocks)
        segment_blocks(storage, tokens, first, blocks, w, x, stride, pairs, factors, main);
}
