/* Working memory of one task of attention.c, and the online softmax of one block of its scores. */
#pragma once
#include "attention_tiles.h"

/* Memory of a task, all in one piece of scratch memory. `plain`, `scaled` and `block` hold floats or bf16. */
typedef struct {
    int half, tiles;                        /* tiles: AMX multiplies; then there is memory for 16 n rows */
    int64_t rows, query_width, value_width; /* widths rounded up to a multiple of 16, or 32 if half */
    int64_t folded_page;                    /* page whose channel scales are in `scaled` and `bias`; -1: none */
    float *query, *scores, *out, *maximum, *total, *zero_total, *query_sum, *bias;
    char *plain, *scaled, *block;
} state;

/* One block of keys or values: its position, and the scales and zeros of its codes. */
typedef struct {
    int64_t position, tokens; /* position of the first token in the sequence; number of tokens */
    float factor, scale[BLOCK + 16], zero[BLOCK + 16]; /* written 16 at a time, from any token on */
    int has_scale, has_zero;
} block;

/* Return 16 scores of a row for the softmax: scaled, capped, and -inf for tokens outside from .. to, which the row does
   not see. */
QK_INLINE __m512 finish_scores(const float *scores, int64_t at, const block *keys, const state *s, int64_t row,
                               float softcap, int64_t from, int64_t to) {
    __m512 v = _mm512_mul_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(keys->factor));
    if (keys->has_scale)
        v = _mm512_mul_ps(v, _mm512_loadu_ps(keys->scale + at));
    if (keys->has_zero)
        v = _mm512_fmadd_ps(_mm512_loadu_ps(keys->zero + at), _mm512_set1_ps(s->query_sum[row]), v);
    v = _mm512_add_ps(v, _mm512_set1_ps(s->bias[row]));
    if (softcap > 0)
        v = _mm512_mul_ps(qk_tanh(_mm512_div_ps(v, _mm512_set1_ps(softcap))), _mm512_set1_ps(softcap));
    __mmask16 seen = qk_lanes(at, to) & ~qk_lanes(at, from);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, v);
}

QK_INLINE void rescale_row(const state *s, int64_t row, float factor) {
    float *out = s->out + row * s->value_width;
    for (int64_t k = 0; k < s->value_width; k += 16)
        _mm512_storeu_ps(out + k, _mm512_mul_ps(_mm512_loadu_ps(out + k), _mm512_set1_ps(factor)));
    s->total[row] *= factor;
    s->zero_total[row] *= factor;
}

/* Replace the scores of a row by softmax weights times the scale of each token's value, as floats or bf16. */
static void soften_row(const state *s, int64_t row, const block *keys, const block *values, float softcap,
                       int64_t from, int64_t to) {
    float *scores = s->scores + row * BLOCK;
    __m512 highest = _mm512_set1_ps(-INFINITY), v[BLOCK / 16];
    for (int64_t at = 0; at < keys->tokens; at += 16) {
        v[at / 16] = finish_scores(scores, at, keys, s, row, softcap, from, to);
        highest = _mm512_max_ps(highest, v[at / 16]);
    }
    float maximum = _mm512_reduce_max_ps(highest);
    if (maximum > s->maximum[row]) {
        if (s->maximum[row] > -INFINITY)
            rescale_row(s, row, expf(s->maximum[row] - maximum));
        s->maximum[row] = maximum;
    }
    maximum = from < to ? s->maximum[row] : 0; /* nothing seen yet: all weights are e^-inf */
    __m512 total = _mm512_setzero_ps(), zero = total;
    for (int64_t at = 0; at < keys->tokens; at += 16) {
        __m512 weight = qk_exp(_mm512_sub_ps(v[at / 16], _mm512_set1_ps(maximum)));
        total = _mm512_add_ps(total, weight);
        if (values->has_zero)
            zero = _mm512_fmadd_ps(weight, _mm512_loadu_ps(values->zero + at), zero);
        if (values->has_scale)
            weight = _mm512_mul_ps(weight, _mm512_loadu_ps(values->scale + at));
        if (s->half) /* all scores of the row are in registers by now */
            _mm256_storeu_si256((__m256i *)((uint16_t *)scores + at), (__m256i)_mm512_cvtneps_pbh(weight));
        else
            _mm512_storeu_ps(scores + at, weight);
    }
    s->total[row] += _mm512_reduce_add_ps(total);
    if (values->has_zero)
        s->zero_total[row] += _mm512_reduce_add_ps(zero);
}
