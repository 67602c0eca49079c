/* One step of tuned rounding, for one group of weights after another. See compress/algorithms/_autoround_weight.py,
   which has the same formulas in torch. */
#include "native.h"

typedef struct {
    const void *weight;         /* (groups, size), float32 or bf16 */
    const float *scale, *zero;  /* (groups); zero: NULL if symmetric */
    int64_t groups, size;
    float least, largest;       /* codes */
    int weight_is_bf16, other_is_bf16;
} Tuned;

QK_INLINE float load(const void *values, int is_bf16, int64_t i) {
    if (!is_bf16) return ((const float *)values)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)values)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

QK_INLINE void store(void *values, int is_bf16, int64_t i, float value) {
    if (!is_bf16) {
        ((float *)values)[i] = value;
        return;
    }
    uint32_t bits; /* round to nearest even; values are finite */
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)values)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

QK_INLINE float clamped(float value, float least, float largest) {
    value = value > least ? value : least; /* catches NaN too */
    return value < largest ? value : largest;
}

/* `weight_is_bf16` and `other_is_bf16` are constants where these are inlined, so that the loops become vectors. */
QK_INLINE void move_group(const Tuned *t, int weight_is_bf16, int other_is_bf16, int64_t n, const void *gradient,
                          float *offset, float *by_scale, float *by_zero, float rate, float furthest) {
    const float scale = t->scale[n], zero = t->zero ? t->zero[n] : 0, step = scale < 0 ? -rate : rate;
    const float least = t->least, largest = t->largest;
    const void *weight = t->weight; /* read once: for all the compiler knows, a store to `offset` may change it */
    const int64_t start = n * t->size, end = start + t->size;
    float of_scale = 0, of_zero = 0;
    _Pragma("omp simd reduction(+ : of_scale, of_zero)") for (int64_t i = start; i < end; i++) {
        const float ratio = load(weight, weight_is_bf16, i) / scale, slope = load(gradient, other_is_bf16, i);
        const float raw = rintf(ratio + offset[i]) + zero, code = clamped(raw, least, largest);
        const float inside = raw == code ? 1 : 0, own = slope * inside;
        of_scale += (code - zero - ratio * inside) * slope;
        of_zero += slope - own;
        const float sign = (own > 0 ? 1.0f : 0.0f) - (own < 0 ? 1.0f : 0.0f);
        offset[i] = clamped(offset[i] - step * sign, -furthest, furthest);
    }
    by_scale[n] = of_scale;
    by_zero[n] = -scale * of_zero;
}

QK_INLINE void decode_group(const Tuned *t, int weight_is_bf16, int other_is_bf16, int64_t n, const float *offset,
                            void *values) {
    const float scale = t->scale[n], zero = t->zero ? t->zero[n] : 0, least = t->least, largest = t->largest;
    const void *weight = t->weight;
    const int64_t start = n * t->size, end = start + t->size;
    _Pragma("omp simd") for (int64_t i = start; i < end; i++) {
        const float raw = rintf(load(weight, weight_is_bf16, i) / scale + offset[i]) + zero;
        store(values, other_is_bf16, i, (clamped(raw, least, largest) - zero) * scale);
    }
}

#define EACH_GROUP(call)                                                                                              \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1)") for (int64_t n = 0; n < t.groups; n++) {        \
        if (t.weight_is_bf16 && t.other_is_bf16) call(&t, 1, 1, n, ARGUMENTS);                                        \
        else if (t.weight_is_bf16) call(&t, 1, 0, n, ARGUMENTS);                                                      \
        else if (t.other_is_bf16) call(&t, 0, 1, n, ARGUMENTS);                                                       \
        else call(&t, 0, 0, n, ARGUMENTS);                                                                            \
    }

/* Move the offsets against the signs of their gradients; return the gradients of scales and zero points, (groups). */
QK_EXPORT void qk_tuned_move(const void *weight, int weight_is_bf16, const float *scale, const float *zero,
                             int64_t groups, int64_t size, float least, float largest, const void *gradient,
                             int gradient_is_bf16, float *offset, float *by_scale, float *by_zero, float rate,
                             float furthest, int threads) {
    const Tuned t = {weight, scale, zero, groups, size, least, largest, weight_is_bf16, gradient_is_bf16};
#define ARGUMENTS gradient, offset, by_scale, by_zero, rate, furthest
    EACH_GROUP(move_group)
#undef ARGUMENTS
}

/* Write the decoded values of the current codes. */
QK_EXPORT void qk_tuned_values(const void *weight, int weight_is_bf16, const float *scale, const float *zero,
                               int64_t groups, int64_t size, float least, float largest, const float *offset,
                               void *values, int values_are_bf16, int threads) {
    const Tuned t = {weight, scale, zero, groups, size, least, largest, weight_is_bf16, values_are_bf16};
#define ARGUMENTS offset, values
    EACH_GROUP(decode_group)
#undef ARGUMENTS
}
