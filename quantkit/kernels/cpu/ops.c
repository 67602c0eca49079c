/* Norms, rotation and gated activations, each with one read, one write, and float32 in between. See
   quantkit/kernels/cpu/ops.py. */
#include "activations.h"
#include "ops.h"
#include "vector_math.h"

/* Below this many elements, the barrier of a second thread costs more than the work. */
#define PARALLEL_ELEMENTS (1 << 16)

QK_INLINE float row_scale(const void *x, int64_t width, int type, float eps) {
    __m512 a = _mm512_setzero_ps(), b = a;
    int64_t k = 0;
    for (; k + 32 <= width; k += 32) {
        __m512 first = qk_load_state(x, k, type, 0xFFFF), second = qk_load_state(x, k + 16, type, 0xFFFF);
        a = _mm512_fmadd_ps(first, first, a);
        b = _mm512_fmadd_ps(second, second, b);
    }
    for (; k < width; k += 16) {
        __m512 v = qk_load_state(x, k, type, qk_lanes(k, width));
        a = _mm512_fmadd_ps(v, v, a);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(a, b)) / (float)width + eps);
}

QK_INLINE void norm_row(const void *x, const void *weight, void *out, int64_t width, int type, float eps, float offset) {
    __m512 scale = _mm512_set1_ps(row_scale(x, width, type, eps)), add = _mm512_set1_ps(offset);
    for (int64_t k = 0; k < width; k += 16) {
        __mmask16 lanes = qk_lanes(k, width);
        __m512 w = _mm512_add_ps(qk_load_state(weight, k, type, lanes), add);
        qk_store_state(out, k, type, lanes, _mm512_mul_ps(_mm512_mul_ps(qk_load_state(x, k, type, lanes), scale), w));
    }
}

void qk_norm_row(const void *x, const void *weight, void *out, int64_t width, int type, float eps, float offset) {
    if (type == QK_F32) norm_row(x, weight, out, width, QK_F32, eps, offset);
    else norm_row(x, weight, out, width, QK_BF16, eps, offset);
}

/* x: outer x inner rows with these strides, in elements; out: dense. */
QK_EXPORT void qk_rms_norm(const void *x, const void *weight, void *out, int64_t outer, int64_t inner, int64_t width,
                           int64_t outer_stride, int64_t inner_stride, double eps, double offset, int type,
                           int threads) {
    int64_t size = qk_state_bytes(type), rows = outer * inner;
    threads = rows * width < PARALLEL_ELEMENTS ? 1 : threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const char *from = (const char *)x + (row / inner * outer_stride + row % inner * inner_stride) * size;
        char *to = (char *)out + row * width * size;
        qk_norm_row(from, weight, to, width, type, (float)eps, (float)offset);
    }
}

QK_INLINE void add_norm_row(const void *x, const void *residual, const void *weight, void *normed, void *total,
                            int64_t width, int type, float eps, float offset) {
    for (int64_t k = 0; k < width; k += 16) {
        __mmask16 lanes = qk_lanes(k, width);
        qk_store_state(total, k, type, lanes,
                       _mm512_add_ps(qk_load_state(x, k, type, lanes), qk_load_state(residual, k, type, lanes)));
    }
    norm_row(total, weight, normed, width, type, eps, offset);
}

void qk_add_norm_row(const void *x, const void *residual, const void *weight, void *normed, void *total, int64_t width,
                     int type, float eps, float offset) {
    if (type == QK_F32) add_norm_row(x, residual, weight, normed, total, width, QK_F32, eps, offset);
    else add_norm_row(x, residual, weight, normed, total, width, QK_BF16, eps, offset);
}

QK_INLINE void add_row(void *x, const void *added, QkRange columns, int type) {
    for (int64_t k = columns.first; k < columns.last; k += 16) {
        __mmask16 lanes = qk_lanes(k, columns.last);
        qk_store_state(x, k, type, lanes,
                       _mm512_add_ps(qk_load_state(x, k, type, lanes), qk_load_state(added, k, type, lanes)));
    }
}

void qk_add_row(void *x, const void *added, QkRange columns, int type) {
    if (type == QK_F32) add_row(x, added, columns, QK_F32);
    else add_row(x, added, columns, QK_BF16);
}

/* All arrays are dense. */
QK_EXPORT void qk_add_rms_norm(const void *x, const void *residual, const void *weight, void *normed, void *total,
                               int64_t rows, int64_t width, double eps, double offset, int type, int threads) {
    int64_t row_bytes = width * qk_state_bytes(type);
    threads = rows * width < PARALLEL_ELEMENTS ? 1 : threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * row_bytes;
        qk_add_norm_row((const char *)x + at, (const char *)residual + at, weight, (char *)normed + at,
                        (char *)total + at, width, type, (float)eps, (float)offset);
    }
}

QK_INLINE void rotate_head(void *states, const float *cos, const float *sin, int64_t half, int type) {
    for (int64_t k = 0; k < half; k += 16) {
        __mmask16 lanes = qk_lanes(k, half);
        __m512 c = _mm512_maskz_loadu_ps(lanes, cos + k), s = _mm512_maskz_loadu_ps(lanes, sin + k);
        __m512 a = qk_load_state(states, k, type, lanes), b = qk_load_state(states, k + half, type, lanes);
        qk_store_state(states, k, type, lanes, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        qk_store_state(states, k + half, type, lanes, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

void qk_rotate_head(void *states, const float *cos, const float *sin, int64_t half, int type) {
    if (type == QK_F32) rotate_head(states, cos, sin, half, QK_F32);
    else rotate_head(states, cos, sin, half, QK_BF16);
}

/* Rotate channel i with channel i + half. Strides are in elements; the heads of a token are adjacent. */
QK_EXPORT void qk_rotary(void *query, void *key, const float *cos, const float *sin, int64_t tokens,
                         int64_t query_heads, int64_t key_heads, int64_t head_dim, int64_t query_stride,
                         int64_t key_stride, int64_t half, int type, int threads) {
    int64_t heads = query_heads + key_heads, size = qk_state_bytes(type);
    threads = tokens * heads * head_dim < PARALLEL_ELEMENTS ? 1 : threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            char *at = head < query_heads ? (char *)query + (token * query_stride + head * head_dim) * size
                                          : (char *)key + (token * key_stride + (head - query_heads) * head_dim) * size;
            qk_rotate_head(at, cos + token * half, sin + token * half, half, type);
        }
}

enum { SILU, GELU, GELU_TANH };

QK_INLINE __m512 activate(__m512 x, int kind) {
    __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    if (kind == SILU)
        return _mm512_div_ps(x, _mm512_add_ps(one, qk_exp(_mm512_sub_ps(zero, x))));
    __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    if (kind == GELU)
        return _mm512_fmadd_ps(half, qk_erf(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678118654752f))), half);
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return _mm512_fmadd_ps(half, qk_tanh(_mm512_mul_ps(inner, _mm512_set1_ps(0.79788456080286536f))), half);
}

QK_INLINE void gate_row(const void *gate_up, void *out, int64_t width, QkRange columns, int kind, int type) {
    for (int64_t k = columns.first; k < columns.last; k += 16) {
        __mmask16 lanes = qk_lanes(k, columns.last);
        __m512 gate = activate(qk_load_state(gate_up, k, type, lanes), kind);
        qk_store_state(out, k, type, lanes, _mm512_mul_ps(gate, qk_load_state(gate_up, k + width, type, lanes)));
    }
}

void qk_gate_row(const void *gate_up, void *out, int64_t width, QkRange columns, int kind, int type) {
#define CASE(k) \
    if (kind == k && type == QK_F32) gate_row(gate_up, out, width, columns, k, QK_F32); \
    if (kind == k && type == QK_BF16) gate_row(gate_up, out, width, columns, k, QK_BF16);
    CASE(SILU) CASE(GELU) CASE(GELU_TANH)
#undef CASE
}

/* gate_up: rows of 2 x width, out: rows of width, all dense. */
QK_EXPORT void qk_gated(const void *gate_up, void *out, int64_t rows, int64_t width, int kind, int type, int threads) {
    int64_t row_bytes = width * qk_state_bytes(type);
    threads = rows * width * 4 < PARALLEL_ELEMENTS ? 1 : threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        qk_gate_row((const char *)gate_up + 2 * row * row_bytes, (char *)out + row * row_bytes, width,
                    (QkRange){0, width}, kind, type);
    }
}
