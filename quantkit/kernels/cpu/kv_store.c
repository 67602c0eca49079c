/* Store the new keys and values of one step in the pool, quantized exactly as in
   quantkit/kernels/reference/kv_codes.py. Every product below is by a power of two or is followed by a division, so a
   fused multiply-add changes nothing. */
#include "kv.h"

#define HALF_ULP 0x1p-11f
#define HALF_TINY 0x1p-25f
#define LARGEST 65504.0f
#define PARALLEL_ELEMENTS (1 << 16)
#define FINEST 32767.0f
#define LEAST 1e-30f

enum { MOST_CHANNELS = 512 }; /* of values of 2 and 3 bits; quantkit/kernels/cpu/attention.py leaves others to torch */

/* Return an fp16 number that is not below the given scale and not zero, as a float. */
QK_INLINE __m512 round_up(__m512 scale) {
    __m512 up = _mm512_add_ps(scale, _mm512_mul_ps(scale, _mm512_set1_ps(HALF_ULP)));
    up = _mm512_add_ps(up, _mm512_set1_ps(HALF_TINY));
    up = _mm512_min_ps(_mm512_set1_ps(LARGEST), _mm512_max_ps(_mm512_set1_ps(2 * HALF_TINY), up));
    return _mm512_cvtph_ps(_mm512_cvtps_ph(up, 8));
}

/* Return an fp16 number that is not above `low`, as a float. */
QK_INLINE __m512 round_down(__m512 low) {
    __m512 down = _mm512_sub_ps(low, _mm512_mul_ps(_mm512_abs_ps(low), _mm512_set1_ps(HALF_ULP)));
    down = _mm512_sub_ps(down, _mm512_set1_ps(HALF_TINY));
    down = _mm512_min_ps(_mm512_set1_ps(LARGEST), _mm512_max_ps(_mm512_set1_ps(-LARGEST), down));
    return _mm512_cvtph_ps(_mm512_cvtps_ph(down, 8));
}

QK_INLINE uint16_t to_half(__m512 v) { return (uint16_t)_mm256_extract_epi16(_mm512_cvtps_ph(v, 8), 0); }

/* Return the nearest code in low .. high, ties to even. */
QK_INLINE __m512i to_code(__m512 v, float low, float high) {
    __m512 rounded = _mm512_roundscale_ps(v, 8);
    rounded = _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), rounded));
    return _mm512_cvtps_epi32(rounded);
}

/* Convert to e4m3 with integer arithmetic: add half a unit of the last kept bit, minus one if that bit is 0. Below
   2^-6, e4m3 has the spacing that floats have from 2^14 on, so adding 2^14 rounds. */
QK_INLINE __m128i to_fp8(__m512 v) {
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    v = _mm512_min_ps(_mm512_set1_ps(448), _mm512_max_ps(_mm512_set1_ps(-448), v));
    __m512i bits = _mm512_castps_si512(v), magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
    __m512i code = _mm512_add_epi32(_mm512_add_epi32(magnitude, odd), _mm512_set1_epi32((7 - 127) * (1 << 23) + 0x7FFFF));
    code = _mm512_srli_epi32(code, 20);
    __m512 big = _mm512_set1_ps(0x1p14f);
    __m512i small = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), big)),
                                     _mm512_castps_si512(big));
    code = _mm512_mask_mov_epi32(code, _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32((127 - 6) << 23)), small);
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7F));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80))));
}

QK_INLINE void store_plain(uint8_t *to, const uint8_t *from, int64_t width, int type, int stored) {
    for (int64_t k = 0; k < width; k += 16) {
        __mmask16 lanes = qk_lanes(k, width);
        qk_store_state(to, k, stored, lanes, qk_load_state(from, k, type, lanes));
    }
}

QK_INLINE void store_fp8(uint8_t *to, const uint8_t *from, int64_t width, int type, __m512 scale) {
    for (int64_t k = 0; k < width; k += 16) {
        __mmask16 lanes = qk_lanes(k, width);
        _mm_mask_storeu_epi8(to + k, lanes, to_fp8(_mm512_div_ps(qk_load_state(from, k, type, lanes), scale)));
    }
}

QK_INLINE __m512 scale_of(const uint8_t *from, int64_t width, int type, float limit) {
    __m512 highest = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 16)
        highest = _mm512_max_ps(highest, _mm512_abs_ps(qk_load_state(from, k, type, qk_lanes(k, width))));
    return round_up(_mm512_div_ps(_mm512_set1_ps(_mm512_reduce_max_ps(highest)), _mm512_set1_ps(limit)));
}

QK_INLINE void store_int8(uint8_t *to, const uint8_t *from, int64_t width, int type, __m512 scale) {
    for (int64_t k = 0; k < width; k += 16) {
        __mmask16 lanes = qk_lanes(k, width);
        __m512i codes = to_code(_mm512_div_ps(qk_load_state(from, k, type, lanes), scale), -127, 127);
        _mm_mask_storeu_epi8(to + k, lanes, _mm512_cvtepi32_epi8(codes));
    }
}

/* Store a byte for each lane: the code of `low` in the low nibble, and that of `high` in the high nibble. `low` holds
   channels from k on, `high` channels from width / 2 + k on. */
QK_INLINE void pack_int4(uint8_t *to, __mmask16 lanes, __m512 low, __m512 high) {
    __m512i pair = _mm512_or_si512(to_code(low, 0, 15), _mm512_slli_epi32(to_code(high, 0, 15), 4));
    _mm_mask_storeu_epi8(to, lanes, _mm512_cvtepi32_epi8(pair));
}

QK_INLINE void store_int4(uint8_t *to, uint16_t *scales, uint16_t *zeros, const uint8_t *from, int64_t width,
                          int type) {
    __m512 low = _mm512_set1_ps(INFINITY), high = _mm512_set1_ps(-INFINITY);
    for (int64_t k = 0; k < width; k += 16) {
        __mmask16 lanes = qk_lanes(k, width);
        __m512 v = qk_load_state(from, k, type, lanes);
        low = _mm512_mask_min_ps(low, lanes, low, v);
        high = _mm512_mask_max_ps(high, lanes, high, v);
    }
    __m512 zero = round_down(_mm512_set1_ps(_mm512_reduce_min_ps(low)));
    __m512 range = _mm512_sub_ps(_mm512_set1_ps(_mm512_reduce_max_ps(high)), zero);
    __m512 scale = round_up(_mm512_div_ps(range, _mm512_set1_ps(15)));
    *scales = to_half(scale), *zeros = to_half(zero);
    for (int64_t k = 0; k < width / 2; k += 16) {
        __mmask16 lanes = qk_lanes(k, width / 2);
        __m512 first = _mm512_sub_ps(qk_load_state(from, k, type, lanes), zero);
        __m512 second = _mm512_sub_ps(qk_load_state(from, width / 2 + k, type, lanes), zero);
        pack_int4(to + k, lanes, _mm512_div_ps(first, scale), _mm512_div_ps(second, scale));
    }
}

/* Pack codes, a byte each, of 2 or 3 bits. */
static void pack_small(uint8_t *to, const uint8_t *codes, int64_t width, int type) {
    int64_t quarter = width / 4, eighth = width / 8;
    for (int64_t i = 0; i < quarter; i++)
        to[i] = (uint8_t)((codes[i] & 3) | (codes[i + quarter] & 3) << 2 | (codes[i + 2 * quarter] & 3) << 4 |
                          (codes[i + 3 * quarter] & 3) << 6);
    if (type != KV_TURNED2)
        for (int64_t i = 0; i < eighth; i++) {
            int byte = 0;
            for (int j = 0; j < 8; j++)
                byte |= (codes[i + j * eighth] >> 2) << j;
            to[quarter + i] = (uint8_t)byte;
        }
}

/* Store rotated values. All sums are of integers, and exact. Overwrites the values. */
static void store_turned(uint8_t *to, uint16_t *scale, float *x, int64_t width, int type) {
    float limit = type == KV_TURNED3 ? 7 : 3, middle = kv_middle(type), block = (float)(width & -width), largest = LEAST;
    uint8_t codes[MOST_CHANNELS];
    int64_t magnitude = 0;
    for (int64_t k = 0; k < width; k++)
        largest = fmaxf(largest, fabsf(x[k]));
    float unit = largest / FINEST;
    for (int64_t k = 0; k < width; k++)
        x[k] = rintf(x[k] / unit);
    kv_change_signs(x, width);
    kv_turn(x, width);
    for (int64_t k = 0; k < width; k++)
        magnitude += (int64_t)fabsf(x[k]);
    float step = (type == KV_TURNED3 ? 0.7345f : 1.248f) * ((float)magnitude / (float)width) * (unit / block);
    step = fminf(LARGEST, fmaxf(2 * HALF_TINY, step));
    *scale = to_half(_mm512_set1_ps(step));
    float divisor = _mm512_reduce_max_ps(qk_load_state((const uint8_t *)scale, 0, QK_F16, 1)) * block / unit;
    for (int64_t k = 0; k < width; k++)
        codes[k] = (uint8_t)fminf(limit, fmaxf(0, rintf(x[k] / divisor + middle)));
    pack_small(to, codes, width, type);
}

/* Store one token of one head in its slot of a page. */
static void store_token(const kv_layer *layer, const kv_array *array, int64_t page, int64_t head, int64_t token,
                        const uint8_t *from, int type) {
    uint8_t *to = kv_codes(layer, array, page, head, token);
    int64_t width = array->width;
    __m512 scale = _mm512_set1_ps(array->fixed ? array->fixed[head] : 1);
    if (array->type <= KV_F16) {
        store_plain(to, from, width, type, (int)array->type);
        return;
    }
    uint16_t *scales = kv_scales(layer, array, array->scale, page, head, token);
    if (kv_is_turned(array)) {
        float states[MOST_CHANNELS];
        store_plain((uint8_t *)states, from, width, type, QK_F32);
        store_turned(to, scales, states, width, (int)array->type);
        return;
    }
    if (array->type == KV_INT4) {
        store_int4(to, scales, kv_scales(layer, array, array->zero, page, head, token), from, width, type);
        return;
    }
    if (array->granularity == KV_TOKEN) {
        scale = scale_of(from, width, type, array->type == KV_FP8 ? 448 : 127);
        *scales = to_half(scale);
    }
    if (array->type == KV_FP8)
        store_fp8(to, from, width, type, scale);
    else
        store_int8(to, from, width, type, scale);
}

/* ---- complete pages ---- */

/* Keys or values of one head of one sequence that wait in a residual window until their page is complete. */
typedef struct {
    const kv_array *array;
    const uint8_t *fresh; /* the first new token */
    int64_t token_bytes;  /* between new tokens */
    int64_t row, head, cached;
} waiting;

/* Collect a page as floats (tokens, stride): older tokens from the residual window, and new ones rounded to the
   window's type. */
static void gather_page(const kv_new_states *s, const waiting *w, int64_t position, float *out, int64_t stride) {
    const kv_layer *layer = s->layer;
    int64_t width = w->array->width, old = qk_max(0, w->cached - position);
    if (old)
        kv_load_residual(layer, w->array, w->row, w->head, position, old, out, stride);
    for (int64_t t = old; t < layer->page_size; t++) {
        const uint8_t *from = w->fresh + (position + t - w->cached) * w->token_bytes;
        for (int64_t k = 0; k < width; k += 16) {
            __m512 v = qk_load_state(from, k, s->type, qk_lanes(k, width));
            if (layer->residual_type != s->type) {
                uint8_t rounded[64];
                qk_store_state(rounded, 0, (int)layer->residual_type, 0xFFFF, v);
                v = qk_load_state(rounded, 0, (int)layer->residual_type, 0xFFFF);
            }
            _mm512_storeu_ps(out + t * stride + k, v);
        }
    }
}

/* Return the scale and the zero of the codes for numbers between two bounds. */
QK_INLINE __m512 channel_grid(__m512 low, __m512 high, int type, __m512 *zero) {
    if (type >= KV_INT4) {
        *zero = round_down(low);
        return round_up(_mm512_div_ps(_mm512_sub_ps(high, *zero), _mm512_set1_ps(type == KV_INT4 ? 15 : 7)));
    }
    __m512 middle = _mm512_mul_ps(_mm512_add_ps(low, high), _mm512_set1_ps(0.5f));
    middle = _mm512_min_ps(_mm512_set1_ps(LARGEST), _mm512_max_ps(_mm512_set1_ps(-LARGEST), middle));
    *zero = _mm512_cvtph_ps(_mm512_cvtps_ph(middle, 8));
    __m512 reach = _mm512_max_ps(_mm512_sub_ps(high, *zero), _mm512_sub_ps(*zero, low));
    return round_up(_mm512_div_ps(reach, _mm512_set1_ps(127)));
}

/* Store the scales and zeros of all channels, then the codes. `keys` (tokens, stride) is overwritten with unrounded
   codes. */
static void quantize_page(const kv_layer *layer, const kv_array *array, int64_t page, int64_t head, float *keys,
                          int64_t stride) {
    uint16_t *scales = kv_scales(layer, array, array->scale, page, head, 0);
    uint16_t *zeros = kv_scales(layer, array, array->zero, page, head, 0);
    int64_t tokens = layer->page_size, width = array->width;
    for (int64_t k = 0; k < width; k += 16) {
        __m512 low = _mm512_loadu_ps(keys + k), high = low;
        for (int64_t t = 1; t < tokens; t++) {
            __m512 v = _mm512_loadu_ps(keys + t * stride + k);
            low = _mm512_min_ps(low, v), high = _mm512_max_ps(high, v);
        }
        __m512 zero, scale = channel_grid(low, high, (int)array->type, &zero);
        __mmask16 lanes = qk_lanes(k, width);
        _mm256_mask_storeu_epi16(scales + k, lanes, _mm512_cvtps_ph(scale, 8));
        _mm256_mask_storeu_epi16(zeros + k, lanes, _mm512_cvtps_ph(zero, 8));
        for (int64_t t = 0; t < tokens; t++) {
            float *at = keys + t * stride + k;
            _mm512_storeu_ps(at, _mm512_div_ps(_mm512_sub_ps(_mm512_loadu_ps(at), zero), scale));
        }
    }
    for (int64_t t = 0; t < tokens; t++) {
        uint8_t *to = kv_codes(layer, array, page, head, t);
        const float *from = keys + t * stride;
        if (array->type == KV_INT8) {
            store_int8(to, (const uint8_t *)from, width, QK_F32, _mm512_set1_ps(1));
            continue;
        }
        if (array->type == KV_INT3) {
            uint8_t codes[MOST_CHANNELS];
            for (int64_t k = 0; k < width; k++)
                codes[k] = (uint8_t)fminf(7, fmaxf(0, rintf(from[k])));
            pack_small(to, codes, width, KV_INT3);
            continue;
        }
        for (int64_t k = 0; k < width / 2; k += 16) {
            __mmask16 lanes = qk_lanes(k, width / 2);
            pack_int4(to + k, lanes, _mm512_maskz_loadu_ps(lanes, from + k),
                      _mm512_maskz_loadu_ps(lanes, from + width / 2 + k));
        }
    }
}

/* Store in the pool the pages that this step completes, then store the newest tokens in the residual window. Returns 0,
   or 1 if out of memory. */
static int store_pages(const kv_new_states *s, int64_t sequence, const waiting *w) {
    const kv_layer *layer = s->layer;
    int64_t stride = (w->array->width + 15) / 16 * 16, tokens = layer->page_size;
    int64_t length = s->batch->context_lengths[sequence];
    float *states = qk_scratch(QK_SLOT_ATTENTION_B, (size_t)(tokens * stride) * sizeof(float));
    if (!states)
        return 1;
    for (int64_t number = w->cached / tokens; number < length / tokens; number++) {
        int64_t page = s->batch->page_table[sequence * s->batch->table_stride + number];
        gather_page(s, w, number * tokens, states, stride);
        if (w->array->granularity == KV_CHANNEL) {
            quantize_page(layer, w->array, page, w->head, states, stride);
            continue;
        }
        for (int64_t t = 0; t < tokens; t++)
            store_token(layer, w->array, page, w->head, t, (const uint8_t *)(states + t * stride), QK_F32);
    }
    for (int64_t at = qk_max(w->cached, length - layer->residual_tokens); at < length; at++)
        store_plain(kv_residual(layer, w->array, w->row, w->head, at), w->fresh + (at - w->cached) * w->token_bytes,
                    w->array->width, s->type, (int)layer->residual_type);
    return 0;
}

int kv_store_head(const kv_new_states *s, int64_t sequence, int64_t start, int64_t head) {
    const kv_layer *layer = s->layer;
    int64_t size = qk_state_bytes(s->type), length = s->batch->context_lengths[sequence];
    int64_t new = s->batch->query_lengths[sequence], row = s->batch->residual_rows[sequence];
    const waiting sides[] = {
        {&layer->key, s->key + (start * s->key_stride + head * layer->key.width) * size, s->key_stride * size,
         row, head, length - new},
        {&layer->value, s->value + (start * s->value_stride + head * layer->value.width) * size,
         s->value_stride * size, row, head, length - new}};
    int failed = 0;
    for (const waiting *w = sides; w < sides + 2; w++) {
        if (w->array->residual) {
            failed |= store_pages(s, sequence, w);
            continue;
        }
        for (int64_t i = 0; i < new; i++) {
            int64_t position = length - new + i, token = position % layer->page_size;
            int64_t page = s->batch->page_table[sequence * s->batch->table_stride + position / layer->page_size];
            store_token(layer, w->array, page, head, token, w->fresh + i * w->token_bytes, s->type);
        }
    }
    return failed;
}

int kv_store(const kv_new_states *s, int threads) {
    int failed = 0;
    for (int64_t sequence = 0, start = 0; sequence < s->batch->sequences; sequence++) {
        int64_t new = s->batch->query_lengths[sequence];
        int used = new * s->layer->heads * s->layer->key.width < PARALLEL_ELEMENTS ? 1 : threads;
#pragma omp parallel for num_threads(used) if (used > 1) reduction(| : failed)
        for (int64_t head = 0; head < s->layer->heads; head++)
            failed |= kv_store_head(s, sequence, start, head);
        start += new;
    }
    return failed;
}
