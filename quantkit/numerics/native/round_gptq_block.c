/* GPTQ's loop inside a block of columns, for integers: round one column, and let the other columns compensate for its
   error. See compress/algorithms/_gptq_loop.py. */
#include "native.h"

enum { LANES = 32, MOST = 128 }; /* outputs at once, whose `owed` stays in cache; columns of a block */

typedef struct {
    const float *lower, *scales, *zeros; /* zeros: NULL if symmetric */
    const int64_t *groups;               /* group of each column */
    int64_t stride, columns, outputs;    /* row stride of `lower`; columns of the block; all outputs */
    float least, largest;
} Block;

QK_INLINE void settle(const Block *block, int has_zeros, float *rows, float *due, int8_t *codes) {
    const float least = block->least, largest = block->largest;
    float owed[MOST][LANES];
    for (int64_t i = 0; i < block->columns; i++) memcpy(owed[i], due + i * block->outputs, sizeof owed[i]);
    for (int64_t i = block->columns - 1; i >= 0; i--) {
        const float *factors = block->lower + i * block->stride, pivot = factors[i], share = 1 / pivot;
        const float *scale = block->scales + block->groups[i] * block->outputs;
        const float *zero = has_zeros ? block->zeros + block->groups[i] * block->outputs : scale;
        float *row = rows + i * block->outputs, error[LANES];
        int8_t *own = codes + i * block->outputs;
        _Pragma("omp simd") for (int n = 0; n < LANES; n++) {
            const float offset = has_zeros ? zero[n] : 0;
            float code = rintf((row[n] + share * owed[i][n]) / scale[n] + offset);
            code = code > least ? code : least; /* catches NaN too */
            code = code < largest ? code : largest;
            error[n] = row[n] - (code - offset) * scale[n];
            owed[i][n] += pivot * error[n];
            own[n] = (int8_t)code;
        }
        memcpy(row, error, sizeof error);
        memcpy(due + i * block->outputs, owed[i], sizeof owed[i]);
        for (int64_t j = 0; j < i; j++)
            for (int n = 0; n < LANES; n++) owed[j][n] += factors[j] * error[n];
    }
}

static void settle_whole(const Block *block, float *rows, float *due, int8_t *codes) {
    if (block->zeros) settle(block, 1, rows, due, codes);
    else settle(block, 0, rows, due, codes);
}

/* Settle the last outputs, which are too few for all lanes; copies of the last one fill the other lanes. */
static void settle_last(Block block, float *rows, float *due, int8_t *codes, int64_t left) {
    float own_rows[MOST][LANES], own_due[MOST][LANES], scales[MOST][LANES], zeros[MOST][LANES];
    int8_t own_codes[MOST][LANES];
    int64_t groups[MOST];
    for (int64_t i = 0; i < block.columns; i++) {
        groups[i] = i;
        for (int n = 0; n < LANES; n++) {
            const int64_t from = n < left ? n : left - 1, of_group = block.groups[i] * block.outputs + from;
            own_rows[i][n] = rows[i * block.outputs + from];
            own_due[i][n] = due[i * block.outputs + from];
            scales[i][n] = block.scales[of_group];
            zeros[i][n] = block.zeros ? block.zeros[of_group] : 0;
        }
    }
    const int64_t outputs = block.outputs;
    block.scales = scales[0], block.zeros = block.zeros ? zeros[0] : NULL, block.groups = groups, block.outputs = LANES;
    settle_whole(&block, own_rows[0], own_due[0], own_codes[0]);
    for (int64_t i = 0; i < block.columns; i++) {
        memcpy(rows + i * outputs, own_rows[i], (size_t)left * sizeof(float));
        memcpy(due + i * outputs, own_due[i], (size_t)left * sizeof(float));
        memcpy(codes + i * outputs, own_codes[i], (size_t)left);
    }
}

/* Settle at most 128 columns, the last one first. For more columns, return 1 and do nothing. rows: (columns, outputs)
   weights, which are replaced by their errors. due: the corrections from columns settled before, which are replaced by
   L'e. codes: (columns, outputs), the result. lower: L, from the block's first column on. */
QK_EXPORT int qk_settle(float *rows, float *due, int8_t *codes, const float *lower, int64_t stride, const float *scales,
                        const float *zeros, const int64_t *groups, int64_t columns, int64_t outputs, float least,
                        float largest, int threads) {
    if (columns > MOST) return 1;
    const Block block = {lower, scales, zeros, groups, stride, columns, outputs, least, largest};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < outputs; n += LANES) {
        Block own = block;
        own.scales += n;
        if (zeros) own.zeros += n;
        if (outputs - n >= LANES) settle_whole(&own, rows + n, due + n, codes + n);
        else settle_last(own, rows + n, due + n, codes + n, outputs - n);
    }
    return 0;
}
