/* KV pool of a layer, batch of one step, and functions that read tokens of any number type as floats.
   quantkit/kernels/layouts.py describes the layout; quantkit/kernels/cpu/attention.py declares the same structures. */
#pragma once
#include "activations.h"
#include "vector_math.h"

enum { KV_F32, KV_BF16, KV_F16, KV_FP8, KV_INT8, KV_INT4 }; /* the first three equal those of activations.h */
enum { KV_NONE, KV_TENSOR, KV_TOKEN, KV_CHANNEL };

typedef struct {
    int64_t type, granularity, width; /* width: channels of a head */
    int64_t codes, scale, zero;       /* byte offsets of the arrays in a page; -1: no such array */
    const float *fixed;               /* scales of KV_TENSOR, one per head; NULL: all are 1 */
} kv_array;

typedef struct {
    uint8_t *pool;
    uint8_t *residual; /* (rows, heads, residual_tokens, width), or NULL */
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
    return type == KV_F32 ? width * 4 : type <= KV_F16 ? width * 2 : type == KV_INT4 ? width / 2 : width;
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

QK_INLINE uint8_t *kv_residual(const kv_layer *layer, int64_t row, int64_t head, int64_t position) {
    int64_t slot = (row * layer->heads + head) * layer->residual_tokens + position % layer->residual_tokens;
    return layer->residual + slot * layer->key.width * qk_state_bytes((int)layer->residual_type);
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

/* Call `loop` with a constant type, so that the compiler generates a loop for each type. */
#define KV_BY_TYPE(loop) \
    switch (type) { \
    case KV_F32: loop(codes, token_stride, tokens, width, KV_F32, out, stride); break; \
    case KV_BF16: loop(codes, token_stride, tokens, width, KV_BF16, out, stride); break; \
    case KV_F16: loop(codes, token_stride, tokens, width, KV_F16, out, stride); break; \
    case KV_FP8: loop(codes, token_stride, tokens, width, KV_FP8, out, stride); break; \
    case KV_INT8: loop(codes, token_stride, tokens, width, KV_INT8, out, stride); break; \
    default: loop(codes, token_stride, tokens, width, KV_INT4, out, stride); break; \
    }

/* Loop for one type; every caller passes a constant `type`. */
QK_INLINE void kv_dequantize(const uint8_t *codes, int64_t token_stride, int64_t tokens, int64_t width, int type,
                         float *out, int64_t stride) {
    for (int64_t t = 0; t < tokens; t++, codes += token_stride, out += stride) {
        if (type == KV_INT4) {
            kv_dequantize_int4(codes, width, out, stride);
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

QK_INLINE void kv_load_residual(const kv_layer *layer, int64_t row, int64_t head, int64_t position, int64_t tokens,
                            float *out, int64_t stride) {
    int64_t size = kv_token_bytes(layer->residual_type, layer->key.width);
    int64_t first = qk_min(tokens, layer->residual_tokens - position % layer->residual_tokens);
    kv_load(kv_residual(layer, row, head, position), size, first, layer->key.width, layer->residual_type, out, stride);
    if (tokens > first)
        kv_load(kv_residual(layer, row, head, position + first), size, tokens - first, layer->key.width, layer->residual_type,
                out + first * stride, stride);
}
