/* KV pool of a layer, batch of one step, and functions that read tokens of any number type as floats.
   quantkit/kernels/layouts.py describes the layout; quantkit/kernels/cpu/attention.py declares the same structures. */
#pragma once
#include "activations.h"
#include "vector_math.h"

enum { KV_F32, KV_BF16, KV_F16, KV_FP8, KV_INT8, KV_INT4, KV_INT3, KV_TURNED3, KV_TURNED2 }; /* the first three equal those of activations.h */
enum { KV_NONE, KV_TENSOR, KV_TOKEN, KV_CHANNEL };

typedef struct {
    int64_t type, granularity, width; /* width: channels of a head */
    int64_t codes, scale, zero;       /* byte offsets of the arrays in a page; -1: no such array */
    const float *fixed;               /* scales of KV_TENSOR, one per head; NULL: all are 1 */
    uint8_t *residual;                /* (rows, heads, residual_tokens, width); NULL: tokens go to pages at once */
} kv_array;

typedef struct {
    uint8_t *pool;
    int64_t page_bytes, page_size, heads, residual_tokens, residual_type;
    kv_array key, value;
} kv_layer;

typedef struct {
    const int32_t *page_table;
    const int64_t *query_lengths, *context_lengths, *residual_rows;
    int64_t sequences, table_stride;
} kv_batch;

typedef struct {
    const kv_layer *layer;
    const kv_batch *batch;
    const uint8_t *key, *value;
    int64_t key_stride, value_stride; /* between tokens, in elements */
    int type;
} kv_new_states;

/* Store the keys and values of this step in the pool and the residual windows (kv_store.c). `kv_store_head` stores
   those of one head of one sequence, whose first new token is `start`. Both return 0, or 1 if out of memory. */
int kv_store(const kv_new_states *s, int threads);
int kv_store_head(const kv_new_states *s, int64_t sequence, int64_t start, int64_t head);

QK_INLINE int64_t kv_token_bytes(int64_t type, int64_t width) {
    static const int64_t bits[] = {32, 16, 16, 8, 8, 4, 3, 3, 2};
    return width * bits[type] / 8;
}

/* Whether values are stored rotated; see quantkit/kernels/reference/kv_codes.py. */
QK_INLINE int kv_is_turned(const kv_array *array) { return array->type >= KV_TURNED3; }

/* The number that is subtracted from codes: the middle of those of rotated values. */
QK_INLINE float kv_middle(int64_t type) { return type == KV_TURNED3 ? 3.5f : type == KV_TURNED2 ? 1.5f : 0; }

/* Change the signs of the channels whose numbers have an odd number of pairs of neighbouring bits, as in `turned`. */
static inline void kv_change_signs(float *x, int64_t width) {
    for (int64_t k = 0; k < width; k++) {
        int64_t pairs = k & (k >> 1) & 0x5555;
        pairs ^= pairs >> 8, pairs ^= pairs >> 4, pairs ^= pairs >> 2;
        x[k] = pairs & 1 ? -x[k] : x[k];
    }
}

/* Multiply floats by the Hadamard matrix, not normalised, of the largest power of two that divides the width. */
static inline void kv_turn(float *x, int64_t width) {
    int64_t block = width & -width;
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t at = 0; at < width; at += 2 * half)
            for (int64_t i = at; i < at + half; i++) {
                float low = x[i], high = x[i + half];
                x[i] = low + high, x[i + half] = low - high;
            }
}

/* Return the address of one token's codes, for one head in a page. */
QK_INLINE uint8_t *kv_codes(const kv_layer *layer, const kv_array *array, int64_t page, int64_t head, int64_t token) {
    return layer->pool + page * layer->page_bytes + array->codes +
           (head * layer->page_size + token) * kv_token_bytes(array->type, array->width);
}

/* Return the address of an fp16 scale or zero in a page: of one token and head; for KV_CHANNEL (token 0), of the head's
   first channel. */
QK_INLINE uint16_t *kv_scales(const kv_layer *layer, const kv_array *array, int64_t block, int64_t page, int64_t head,
                              int64_t token) {
    int64_t per_head = array->granularity == KV_CHANNEL ? array->width : layer->page_size;
    return (uint16_t *)(layer->pool + page * layer->page_bytes + block) + head * per_head + token;
}

QK_INLINE uint8_t *kv_residual(const kv_layer *layer, const kv_array *array, int64_t row, int64_t head,
                               int64_t position) {
    int64_t slot = (row * layer->heads + head) * layer->residual_tokens + position % layer->residual_tokens;
    return array->residual + slot * array->width * qk_state_bytes((int)layer->residual_type);
}

/* The exponent bias of fp16 is 8 higher than that of e4m3, so a code moved to the position of fp16 bits gives value /
   256. Only NaN (0x7F), which no number is stored as, needs another step. */
QK_INLINE __m512 kv_dequantize_fp8(__m128i codes) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    __m256i half = _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16((short)0xBFFF));
    __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi8(0x7F));
    __mmask16 nan = _mm_cmpeq_epi8_mask(magnitude, _mm_set1_epi8(0x7F));
    return __builtin_expect(nan, 0) ? _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(NAN)) : value;
}

QK_INLINE void kv_dequantize_int4(const uint8_t *codes, int64_t width, float *out, int64_t stride) {
    __m512i mask = _mm512_set1_epi32(15);
    _mm512_storeu_ps(out + stride - 16, _mm512_setzero_ps());
    for (int64_t k = 0; k < width / 2; k += 16) {
        __mmask16 lanes = qk_lanes(k, width / 2);
        __m512i pair = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, codes + k));
        _mm512_mask_storeu_ps(out + k, lanes, _mm512_cvtepi32_ps(_mm512_and_si512(pair, mask)));
        _mm512_mask_storeu_ps(out + width / 2 + k, lanes, _mm512_cvtepi32_ps(_mm512_srli_epi32(pair, 4)));
    }
}

/* Convert 16 codes: their two lower bits start at bit `shift` of each byte of `low`; of 3 bits, the upper one is bit
   `bit` of each byte of `high`. */
QK_INLINE __m512 kv_small_codes(__m512i low, int shift, __m512i high, int bit, int type) {
    __m512i codes = _mm512_and_si512(_mm512_srli_epi32(low, shift), _mm512_set1_epi32(3));
    if (type != KV_TURNED2)
        codes = _mm512_or_si512(codes, _mm512_slli_epi32(
                    _mm512_and_si512(_mm512_srli_epi32(high, bit), _mm512_set1_epi32(1)), 2));
    return _mm512_sub_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(kv_middle(type)));
}

/* How many channels of a quarter are converted with the same bits of bytes. With 64 channels, a vector holds a quarter,
   though its two halves have different upper bits. */
QK_INLINE int64_t kv_small_run(int64_t width, int type) {
    return type != KV_TURNED2 && width != 64 ? width / 8 : width / 4;
}

/* Load the upper bits of 16 channels of a run. */
QK_INLINE __m512i kv_upper_bits(const uint8_t *codes, int64_t width, int64_t k, __mmask16 lanes) {
    uint64_t halves[2];
    if (width != 64)
        return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, codes + width / 4 + k));
    memcpy(halves, codes + width / 4, 8);
    halves[1] = halves[0] >> 1;
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, halves));
}

/* Quarter j of the channels is in bits 2 j and 2 j + 1 of the lower bytes. A byte of upper bits has two bits for each
   quarter: of a channel in its first half, and of one in its second half. */
QK_INLINE void kv_dequantize_small(const uint8_t *codes, int64_t width, int type, float *out, int64_t stride) {
    int64_t quarter = width / 4, run = kv_small_run(width, type);
    _mm512_storeu_ps(out + stride - 16, _mm512_setzero_ps());
    for (int half = 0; half * run < quarter; half++)
        for (int64_t k = 0; k < run; k += 16) {
            __mmask16 lanes = qk_lanes(k, run);
            __m512i low = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, codes + half * run + k)), high = low;
            if (type != KV_TURNED2)
                high = kv_upper_bits(codes, width, k, lanes);
            float *to = out + half * run + k;
            _mm512_mask_storeu_ps(to, lanes, kv_small_codes(low, 0, high, half, type));
            _mm512_mask_storeu_ps(to + quarter, lanes, kv_small_codes(low, 2, high, 2 + half, type));
            _mm512_mask_storeu_ps(to + 2 * quarter, lanes, kv_small_codes(low, 4, high, 4 + half, type));
            _mm512_mask_storeu_ps(to + 3 * quarter, lanes, kv_small_codes(low, 6, high, 6 + half, type));
        }
}

/* Call `loop` with a constant type, so that the compiler generates a loop for each type. */
#define KV_BY_TYPE(loop) \
    switch (type) { \
    case KV_F32: loop(codes, token_stride, tokens, width, KV_F32, out, stride); break; \
    case KV_BF16: loop(codes, token_stride, tokens, width, KV_BF16, out, stride); break; \
    case KV_F16: loop(codes, token_stride, tokens, width, KV_F16, out, stride); break; \
    case KV_FP8: loop(codes, token_stride, tokens, width, KV_FP8, out, stride); break; \
    case KV_INT8: loop(codes, token_stride, tokens, width, KV_INT8, out, stride); break; \
    case KV_INT4: loop(codes, token_stride, tokens, width, KV_INT4, out, stride); break; \
    case KV_INT3: loop(codes, token_stride, tokens, width, KV_INT3, out, stride); break; \
    case KV_TURNED3: loop(codes, token_stride, tokens, width, KV_TURNED3, out, stride); break; \
    default: loop(codes, token_stride, tokens, width, KV_TURNED2, out, stride); break; \
    }

/* Loop for one type; every caller passes a constant `type`. */
QK_INLINE void kv_dequantize(const uint8_t *codes, int64_t token_stride, int64_t tokens, int64_t width, int type,
                         float *out, int64_t stride) {
    for (int64_t t = 0; t < tokens; t++, codes += token_stride, out += stride) {
        if (type == KV_INT4) {
            kv_dequantize_int4(codes, width, out, stride);
            continue;
        }
        if (type > KV_INT4) {
            kv_dequantize_small(codes, width, type, out, stride);
            continue;
        }
        for (int64_t k = 0; k < width; k += 16) {
            __mmask16 lanes = qk_lanes(k, width);
            __m512 values;
            if (type <= KV_F16)
                values = qk_load_state(codes, k, type, lanes);
            else if (type == KV_FP8)
                values = kv_dequantize_fp8(_mm_maskz_loadu_epi8(lanes, codes + k));
            else
                values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, codes + k)));
            _mm512_storeu_ps(out + k, values);
        }
    }
}

/* Convert the codes of some tokens to floats, without applying scales. out: (tokens, stride), padded with zeros; stride
   is width rounded up to a multiple of 16. */
static inline void kv_load(const uint8_t *codes, int64_t token_stride, int64_t tokens, int64_t width, int64_t type,
                           float *out, int64_t stride) {
    KV_BY_TYPE(kv_dequantize)
}

QK_INLINE void kv_load_residual(const kv_layer *layer, const kv_array *array, int64_t row, int64_t head,
                                int64_t position, int64_t tokens, float *out, int64_t stride) {
    int64_t width = array->width, type = layer->residual_type, size = kv_token_bytes(type, width);
    int64_t first = qk_min(tokens, layer->residual_tokens - position % layer->residual_tokens);
    kv_load(kv_residual(layer, array, row, head, position), size, first, width, type, out, stride);
    if (tokens > first)
        kv_load(kv_residual(layer, array, row, head, position + first), size, tokens - first, width, type,
                out + first * stride, stride);
}
