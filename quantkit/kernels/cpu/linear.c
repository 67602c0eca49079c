/* y = x w' + bias for weights in bf16, fp32, int4, int8 and fp8, inputs in bf16 or fp32, sums in fp32.

   Codes are multiplied without their scales, and the sum of each group is scaled once, so nothing is rounded that the
   definition does not round, except inputs as linear_int16.h says. With AMX, a piece of a panel is dequantized into the
   first-level cache and multiplied by tiles. Without AMX, few tokens are multiplied by codes that are dequantized in registers. For many tokens, a piece is
   dequantized into the cache as with AMX, but multiplied by vectors. */
#include "amx.h"
#include "linear_segment.h"

enum { TILE_BYTES = 16384, ALWAYS = 1 << 30, AHEAD = 4096 };

/* Up to this many tokens, codes are dequantized in registers, again for each block of MAX_TOKENS. Beyond, they are
   dequantized once, into a tile. Milliseconds at 8, 16, 32 and 128 tokens, left in registers, right with a tile,
   measured on Zen 4 for 2048 x 2048:
       bf16  int4  .38 .70 1.35 5.2   .52 .86 1.50 5.4      f32  int4  .67 1.30 2.57 10.4   1.06 1.68 3.05 12.5
             int8  .55  .89 1.62 5.9  .55 1.07 1.74 5.8          int8  .77 1.38 2.65 10.5   1.19 1.82 3.22 12.6
             fp8   .62 1.04 1.92 7.1  .74 1.12 1.75 5.6          fp8   1.01 1.86 3.64 14.4  1.27 1.89 3.23 12.7 */
static const int64_t DIRECT_BF16[] = {[QK_BF16] = ALWAYS, [QK_W4] = ALWAYS, [QK_H8] = 64, [QK_FP8] = 18};
static const int64_t DIRECT_F32[] = {[QK_BF16] = ALWAYS, [QK_F32] = ALWAYS, [QK_W4] = ALWAYS, [QK_W8] = ALWAYS,
                                     [QK_F16] = ALWAYS, [QK_FP8] = 18};

typedef struct {
    const QkProduct *product;
    const QkLinear *linear;
    const void *x;                  /* inputs of the product, or a copy prepared for the loops */
    const float *row_scale, *sums;  /* by token; by token and run; NULL: not needed */
    int64_t tokens, pairs, stride, groups;
    int64_t width, run, runs_per_group, runs; /* pairs in a group; pairs in a run, scaled as one sum */
    const float *units;    /* by token and run: value of 1 in int16 inputs; NULL: inputs are floats or bf16 */
    int x_is_bf16;
    int64_t step;          /* pairs that tiles multiply at once; 0: no tiles */
    const uint8_t *packed; /* inputs packed for tiles; NULL: not packed */
} Job;

/* Load the factors for the sums of one run, which is a group or a piece of a group. `run` counts the runs of all
   groups. */
static void load_factors(const Job *job, int64_t panel, int64_t group, int64_t run, int64_t token, Factors *factors) {
    const QkLinear *linear = job->linear;
    factors->dense = !linear->scale;
    factors->inputs = factors->units = NULL;
    if (factors->dense) return;
    int64_t index = (panel * job->groups + group) * QK_PANEL;
    for (int b = 0; b < 4; b++) factors->scale[b] = qk_load_scale(linear, index + 16 * b);
    factors->stride = job->runs;
    if (job->units) factors->units = job->units + token * job->runs + run;
    if (!job->sums) return;
    factors->inputs = job->sums + token * job->runs + run;
    __m512 offset = _mm512_set1_ps(linear->storage == QK_H8 ? 0.5f : linear->storage == QK_W4 && job->units ? 8 : 0);
    for (int b = 0; b < 4; b++) {
        factors->zero[b] = offset;
        if (!linear->zero) continue;
        const int8_t *codes = (const int8_t *)linear->zero + index + 16 * b;
        __m512 zero = linear->zero_is_float
                          ? _mm512_loadu_ps((const float *)linear->zero + index + 16 * b)
                          : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
        factors->zero[b] = _mm512_add_ps(zero, offset);
    }
}

/* Dequantize `pairs` pairs of a panel; the result has storage QK_BF16 or QK_F32. */
#if QK_AVX512
static void dequantize(int storage, int to_bf16, const uint8_t *w, int64_t pairs, uint8_t *tile) {
    __m512i table[4];
    load_table(storage, table);
#define EACH(kind) \
    case kind: \
        for (int64_t p = 0; p < pairs; p++) { \
            if (to_bf16) { \
                __m512i v[4]; \
                _mm_prefetch((const char *)w + p * PAIR_BYTES[kind] + AHEAD, _MM_HINT_T0); \
                if (PAIR_BYTES[kind] > 64) _mm_prefetch((const char *)w + p * PAIR_BYTES[kind] + AHEAD + 64, _MM_HINT_T0); \
                load_pair(kind, w + p * PAIR_BYTES[kind], table, v); \
                for (int b = 0; b < 4; b++) _mm512_store_si512(tile + 256 * p + 64 * b, v[b]); \
            } else { \
                __m512 v[2][4]; \
                load_pair_f32(kind, w + p * PAIR_BYTES[kind], table, v); \
                for (int i = 0; i < 8; i++) _mm512_store_ps((float *)(tile + 512 * p) + 16 * i, v[i / 4][i % 4]); \
            } \
        } \
        break;
    switch (storage) {
        EACH(QK_W4)
        EACH(QK_H8)
        EACH(QK_FP8)
    }
#undef EACH
}
#else
QK_INLINE void dequantize_as(int storage, const uint8_t *w, int64_t pairs, float *tile) {
    for (int64_t p = 0; p < pairs; p++, w += PAIR_BYTES[storage], tile += 2 * QK_PANEL)
        UNROLL for (int b = 0; b < 4; b++) {
            __m512 v[2];
            load_values(storage, w, b, v);
            for (int i = 0; i < 2; i++) {
                if (storage == QK_W4) v[i] = _mm512_mul_ps(v[i], _mm512_set1_ps(UNITS[b]));
                _mm512_store_ps(tile + QK_PANEL * i + 16 * b, v[i]);
            }
        }
}

static void dequantize(int storage, int to_bf16, const uint8_t *w, int64_t pairs, uint8_t *tile) {
    (void)to_bf16;
    switch (storage) {
#define EACH(kind) \
    case kind: dequantize_as(kind, w, pairs, (float *)tile); break;
        EACH(QK_BF16)
        EACH(QK_F16)
        EACH(QK_W4)
        EACH(QK_W8)
        EACH(QK_FP8)
    }
#undef EACH
}
#endif

/* Return the end of a tile that begins at `start`. A tile ends with a run, so sums consist of the same pieces as
   without tiles. */
static int64_t tile_end(const Job *job, int64_t start) {
    int64_t step = TILE_BYTES / PAIR_BYTES[job->x_is_bf16 ? QK_BF16 : QK_F32];
    int64_t end = start - start % job->width; /* beginning of the group */
    if (job->width > step) {
        int64_t inside = start - end;
        return qk_min(job->pairs, end + qk_min(job->width, inside - inside % job->run + job->run));
    }
    return qk_min(job->pairs, start + step / job->width * job->width);
}

/* Multiply pairs start..end of a panel with `tokens` tokens from `token` on. w: these pairs, in type `storage`. */
static void multiply(const Job *job, int64_t panel, int storage, const uint8_t *w, int64_t start, int64_t end,
                     int64_t token, int64_t tokens, float *main) {
    Segment *const *segments = SEGMENTS_F32[storage];
#if QK_AVX512
    if (job->x_is_bf16) segments = SEGMENTS_BF16[storage];
#elif QK_INT16
    if (job->units) segments = SEGMENTS_I16[storage];
#endif
    int64_t blocks = (tokens + MAX_TOKENS - 1) / MAX_TOKENS, base = tokens / blocks, larger = tokens % blocks;
    int64_t group = start / job->width, run = (start - group * job->width) / job->run;
    int element = job->x_is_bf16 || job->units ? 2 : 4;
    for (int64_t p = start, stop; p < end; p = stop) {
        stop = qk_min(end, qk_min(group * job->width + (run + 1) * job->run, (group + 1) * job->width));
        for (int64_t i = 0, first = 0, count; i < blocks; i++, first += count) {
            Factors factors;
            factors.read_ahead = i == 0 && blocks > 1;
            load_factors(job, panel, group, group * job->runs_per_group + run, token + first, &factors);
            const uint8_t *x = (const uint8_t *)job->x + ((token + first) * job->stride + 2 * p) * element;
            count = base + (i < larger);
            segments[count - 1](w + (p - start) * PAIR_BYTES[storage], x, job->stride, stop - p, &factors,
                                main + first * QK_PANEL);
        }
        if (++run == job->runs_per_group) run = 0, group++;
    }
}

/* Compute 64 outputs of `tokens` tokens (at most QK_ROWS) from `token` on. memory: room for a tile and the results. */
static void one_panel(const Job *job, int64_t panel, int64_t token, int64_t tokens, uint8_t *memory) {
    const QkLinear *linear = job->linear;
    float *main = (float *)(memory + TILE_BYTES);
    int64_t bytes = PAIR_BYTES[linear->storage];
    const uint8_t *codes = linear->codes + panel * job->pairs * bytes;
    int dense = job->x_is_bf16 ? QK_BF16 : QK_F32;
    int64_t direct = job->x_is_bf16 ? DIRECT_BF16[linear->storage] : DIRECT_F32[linear->storage];
    memset(main, 0, (size_t)(tokens * QK_PANEL) * sizeof(float));
    if (tokens <= direct || job->units) {
        multiply(job, panel, linear->storage, codes, 0, job->pairs, token, tokens, main);
    } else {
        for (int64_t start = 0, end; start < job->pairs; start = end) {
            end = tile_end(job, start);
            dequantize(linear->storage, job->x_is_bf16, codes + start * bytes, end - start, memory);
            multiply(job, panel, dense, memory, start, end, token, tokens, main);
        }
    }
    qk_store_tokens(job->product, panel, token, tokens, main, job->row_scale);
}

#if QK_AMX
/* main[token][64] += factors * sums, for `blocks` blocks of 16 outputs from block `first` on. width: distance between
   the sums of two tokens. */
QK_INLINE void add_sums(const float *sums, int64_t width, int64_t tokens, int first, int blocks, const Factors *factors,
                        float *main) {
    for (int64_t m = 0; m < tokens; m++)
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512 sum = _mm512_load_ps(sums + width * m + 16 * b);
            float *to = main + QK_PANEL * m + 16 * (first + b);
            if (factors->inputs)
                sum = _mm512_fnmadd_ps(factors->zero[first + b], _mm512_set1_ps(factors->inputs[m * factors->stride]), sum);
            __m512 before = _mm512_loadu_ps(to);
            _mm512_storeu_ps(to, factors->dense ? _mm512_add_ps(sum, before)
                                                : _mm512_fmadd_ps(sum, factors->scale[first + b], before));
        }
}

/* Multiply pairs p..p + pairs of a panel with `tokens` tokens from `token` on. w: these pairs, in bf16. */
static void multiply_by_tiles(const Job *job, const uint8_t *w, int64_t p, int64_t pairs, int64_t token, int64_t tokens,
                              Factors *factors, float *main) {
    float sums[SQUARE * SQUARE] __attribute__((aligned(64)));
    if (!job->packed) {
        const uint16_t *x = (const uint16_t *)job->x + token * job->stride + 2 * p;
        QK_MULTIPLY_STRIP(_tile_dpbf16ps, w, x, 2 * job->stride, job->step, pairs, sums);
        add_sums(sums, QK_PANEL, tokens, 0, 4, factors, main);
        return;
    }
    for (int64_t m = 0; m < tokens; m += SQUARE) {
        const uint8_t *x = job->packed + ((token + m) * job->pairs + 16 * p) * 4;
        for (int block = 0; block < 4; block += 2) {
            QK_MULTIPLY_SQUARE(_tile_dpbf16ps, w + 64 * block, x, 64 * job->pairs, job->step, pairs, sums);
            add_sums(sums, SQUARE, qk_min(SQUARE, tokens - m), block, 2, factors, main + m * QK_PANEL);
        }
        if (factors->inputs) factors->inputs += SQUARE * factors->stride;
    }
}

/* Like one_panel, but with tiles. */
static void one_panel_by_tiles(const Job *job, int64_t panel, int64_t token, int64_t tokens, uint8_t *memory) {
    const QkLinear *linear = job->linear;
    float *main = (float *)(memory + TILE_BYTES);
    int64_t bytes = PAIR_BYTES[linear->storage];
    const uint8_t *codes = linear->codes + panel * job->pairs * bytes;
    memset(main, 0, (size_t)(tokens * QK_PANEL) * sizeof(float));
    for (int64_t start = 0, end; start < job->pairs; start = end) {
        const uint8_t *w = linear->storage == QK_BF16 ? codes + start * bytes : memory;
        end = tile_end(job, start);
        if (w == memory) dequantize(linear->storage, 1, codes + start * bytes, end - start, memory);
        for (int64_t p = start, stop; p < end; w += 256 * (stop - p), p = stop) {
            int64_t group = p / job->width, run = (p - group * job->width) / job->run;
            stop = qk_min(end, qk_min(group * job->width + (run + 1) * job->run, (group + 1) * job->width));
            Factors factors = {0};
            load_factors(job, panel, group, group * job->runs_per_group + run, token, &factors);
            multiply_by_tiles(job, w, p, stop - p, token, tokens, &factors, main);
        }
    }
    qk_store_tokens(job->product, panel, token, tokens, main, job->row_scale);
}
#endif

/* Prepare the inputs for tiles if the product uses tiles. This depends on the weight and not on the number of tokens,
   because tiles sum in another order. Returns 0, or 1 if out of memory. */
static int prepare_tiles(Job *job, int threads) {
#if QK_AMX
    job->step = job->x_is_bf16 && qk_has_amx() ? qk_tile_step(job->width) : 0;
    if (!job->step || job->tokens <= 16) return 0;
    job->packed = qk_pack(job->x, job->tokens, job->pairs, job->step, threads);
    return !job->packed;
#else
    (void)job, (void)threads;
    return 0;
#endif
}

static int run_panels(const Job *job, QkRange range) {
    size_t bytes = TILE_BYTES + sizeof(float) * QK_PANEL * QK_ROWS;
    uint8_t *memory = qk_scratch(QK_SLOT_LINEAR_PANEL, bytes);
    if (!memory) return 1;
#if QK_AMX
    if (job->step) qk_shape_tiles(job->step, job->tokens);
#endif
    for (int64_t panel = range.first; panel < range.last; panel++)
        for (int64_t token = 0; token < job->tokens; token += QK_ROWS) {
            int64_t tokens = qk_min(QK_ROWS, job->tokens - token);
#if QK_AMX
            if (job->step) one_panel_by_tiles(job, panel, token, tokens, memory);
            else
#endif
            one_panel(job, panel, token, tokens, memory);
        }
#if QK_AMX
    if (job->step) _tile_release();
#endif
    return 0;
}

QK_INLINE __m512 load_some_bf16(const uint16_t *p, __mmask16 mask) {
    __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

QK_INLINE QkRange inputs_of_run(const Job *job, int64_t r) {
    int64_t group = r / job->runs_per_group, first = group * job->width + r % job->runs_per_group * job->run;
    return (QkRange){2 * first, 2 * qk_min(first + job->run, (group + 1) * job->width)};
}

/* Sum the inputs of each run, for the zero points. */
static int sum_inputs(Job *job) {
    float *sums = qk_scratch(QK_SLOT_LINEAR_SUMS, (size_t)(job->tokens * job->runs) * sizeof(float));
    if (!sums) return 1;
    job->sums = sums;
    for (int64_t m = 0; m < job->tokens; m++)
        for (int64_t r = 0; r < job->runs; r++) {
            QkRange inputs = inputs_of_run(job, r);
            int64_t count = inputs.last - inputs.first, at = m * job->stride + inputs.first;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = 0; i < count; i += 16) {
                __mmask16 mask = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
                sum = _mm512_add_ps(sum, job->x_is_bf16 ? load_some_bf16((const uint16_t *)job->x + at + i, mask)
                                                        : _mm512_maskz_loadu_ps(mask, (const float *)job->x + at + i));
            }
            sums[m * job->runs + r] = _mm512_reduce_add_ps(sum);
        }
    return 0;
}

/* Convert bf16 inputs to floats, for machines that multiply only floats. */
static int widen_inputs(Job *job) {
    int64_t count = job->tokens * job->stride;
    const uint16_t *from = job->x;
    float *to = qk_scratch(QK_SLOT_LINEAR_FLOATS, (size_t)count * sizeof(float));
    if (!to) return 1;
    for (int64_t i = 0; i < count; i++) to[i] = qk_bf16_to_float(from[i]);
    job->x = to, job->x_is_bf16 = 0;
    return 0;
}

#if QK_INT16
/* Round the inputs to int16, and sum them, for each run. step: value of code 1; 0: it is chosen for each run. */
static int round_inputs(Job *job, float step) {
    size_t count = (size_t)(job->tokens * job->runs);
    int16_t *codes = qk_scratch(QK_SLOT_LINEAR_INT16, (size_t)(job->tokens * job->stride) * sizeof(int16_t));
    float *units = qk_scratch(QK_SLOT_LINEAR_UNITS, count * sizeof(float));
    float *sums = qk_scratch(QK_SLOT_LINEAR_SUMS, count * sizeof(float));
    if (!codes || !units || !sums) return 1;
    for (int64_t m = 0; m < job->tokens; m++)
        for (int64_t r = 0; r < job->runs; r++) {
            QkRange inputs = inputs_of_run(job, r);
            int64_t at = m * job->stride + inputs.first, i = m * job->runs + r;
            units[i] = round_run((const float *)job->x + at, inputs.last - inputs.first, step, codes + at, sums + i);
            sums[i] *= units[i];
        }
    job->x = codes, job->units = units;
    if (job->linear->zero || job->linear->storage == QK_W4) job->sums = sums;
    return 0;
}
#endif

/* Whether inputs are quantized, each token with one scale. */
static int is_quantized(int activation) { return activation == QK_TO_INT8 || activation == QK_TO_FP8; }

/* Prepare the inputs for the loops: quantized if requested, and padded to an even number per token. */
static int prepare(Job *job) {
    const QkLinear *linear = job->linear;
    const void *x = job->product->x;
    int is_bf16 = job->product->is_bf16, activation = job->product->activation;
    int64_t k = linear->k, padded = job->pairs * 2;
    if (is_quantized(activation)) {
        uint16_t *codes = qk_scratch(QK_SLOT_LINEAR_INPUT, (size_t)(job->tokens * padded) * 2);
        float *scales = qk_scratch(QK_SLOT_LINEAR_SCALES, (size_t)job->tokens * sizeof(float));
        if (!codes || !scales) return 1;
        for (int64_t m = 0; m < job->tokens; m++)
            scales[m] = qk_quantize_bf16((const uint8_t *)x + m * k * (is_bf16 ? 2 : 4), is_bf16, k, padded, activation,
                                         codes + m * padded);
        job->x = codes, job->row_scale = scales, job->x_is_bf16 = 1;
    } else if (padded != k) {
        int element = is_bf16 ? 2 : 4;
        uint8_t *copy = qk_scratch(QK_SLOT_LINEAR_INPUT, (size_t)(job->tokens * padded * element));
        if (!copy) return 1;
        for (int64_t m = 0; m < job->tokens; m++) {
            memcpy(copy + m * padded * element, (const uint8_t *)x + m * k * element, (size_t)(k * element));
            memset(copy + (m * padded + k) * element, 0, (size_t)((padded - k) * element));
        }
        job->x = copy;
    }
    if (job->x_is_bf16 && !QK_AVX512 && widen_inputs(job)) return 1;
#if QK_INT16
    int whole = activation == QK_TO_INT8; /* and so exact in int16 */
    if ((whole || activation == QK_TO_INT16) && (linear->storage == QK_W4 || linear->storage == QK_W8))
        return round_inputs(job, whole);
#endif
    return linear->zero || linear->storage == QK_H8 ? sum_inputs(job) : 0;
}

/* Set the sizes of a product, and prepare its inputs in memory of the calling thread. Returns 0, or 1 if out of
   memory. */
static int begin(Job *job, const QkProduct *product) {
    const QkLinear *linear = product->linear;
    *job = (Job){.product = product, .linear = linear, .x = product->x, .tokens = product->tokens,
                 .pairs = (linear->k + 1) / 2, .x_is_bf16 = product->is_bf16};
    job->stride = job->pairs * 2;
    job->width = linear->group / 2;
    job->groups = job->pairs / job->width;
    int dense = QK_AVX512 && (product->is_bf16 || is_quantized(product->activation)) ? QK_BF16 : QK_F32;
    job->run = qk_min(job->width, TILE_BYTES / PAIR_BYTES[dense]);
    job->runs_per_group = (job->width + job->run - 1) / job->run;
    job->runs = job->groups * job->runs_per_group;
    return prepare(job);
}

int qk_linear_share(const QkProduct *product, int thread, int threads) {
    QkRange panels = qk_share(qk_panels(product), thread, threads);
    Job job;
    return panels.first < panels.last && (begin(&job, product) || prepare_tiles(&job, 1) || run_panels(&job, panels));
}

/* x: (tokens, k), out: (tokens, n), both contiguous and both bf16 or both float. Returns 0, or 1 if out of memory. */
QK_EXPORT int qk_linear(const QkLinear *linear, const void *x, void *out, int64_t tokens, int is_bf16, int activation,
                        int threads) {
    QkProduct product = {linear, x, out, linear->n, tokens, is_bf16, activation};
    Job job;
    if (!tokens) return 0;
    if (begin(&job, &product)) return 1;
    threads = qk_threads(&product, threads);
    if (prepare_tiles(&job, threads)) return 1;
    QK_RUN_PANELS(run_panels, &job, threads)
}
