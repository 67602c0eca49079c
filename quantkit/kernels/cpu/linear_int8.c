/* y = x w' for int8 weights and inputs rounded to int8 per token: integer products, exact sums.

   On x86, vpdpbusd multiplies unsigned by signed bytes, so codes of weights are stored plus 128. At the end of a group,
   (QK_OFFSET + zero point) * (sum of the inputs) is subtracted. */
#include "amx.h"
#include "linear.h"

enum { MAX_TOKENS = 6, QUAD_BYTES = 256, TILE_QUADS = 64, FOR_TILES = 8 };

typedef struct {
    const QkProduct *product;
    const QkLinear *linear;
    int8_t *x;
    float *row_scale;
    int32_t *sums;  /* sums of the inputs, [token][group] */
    int64_t tokens, quads, groups;
    int64_t step;          /* quads that tiles multiply at once; 0: no tiles */
    const uint8_t *packed; /* inputs packed for tiles; NULL: not packed */
} Job;

/* partial[token][64] += w * x over `quads` quads; with `first`, sums start at 0. x has `stride` bytes per token. */
typedef void Segment(const uint8_t *w, const int8_t *x, int64_t stride, int64_t quads, int32_t *partial, int first);

#if QK_AVX512
/* acc += products of four bytes, in assembler: with the intrinsic, GCC 12 copies every accumulator, which halves the
   speed. The accumulators are single variables, because GCC would keep an array of them in memory. */
#define ADD_PRODUCTS(acc, w, x) __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x))
#define PARTIAL(m, b) (partial + QK_PANEL * m + 16 * b)
#define START(m) \
    __m512i s##m##0 = zero, s##m##1 = zero, s##m##2 = zero, s##m##3 = zero; \
    if (m < tokens && !first) { \
        s##m##0 = _mm512_loadu_si512(PARTIAL(m, 0)), s##m##1 = _mm512_loadu_si512(PARTIAL(m, 1)); \
        s##m##2 = _mm512_loadu_si512(PARTIAL(m, 2)), s##m##3 = _mm512_loadu_si512(PARTIAL(m, 3)); \
    }
#define STEP(m) \
    if (m < tokens) { \
        memcpy(&four, x + m * stride + 4 * q, 4); \
        __m512i input = _mm512_set1_epi32(four); \
        ADD_PRODUCTS(s##m##0, v0, input); \
        ADD_PRODUCTS(s##m##1, v1, input); \
        ADD_PRODUCTS(s##m##2, v2, input); \
        ADD_PRODUCTS(s##m##3, v3, input); \
    }
#define END(m) \
    if (m < tokens) { \
        _mm512_storeu_si512(PARTIAL(m, 0), s##m##0), _mm512_storeu_si512(PARTIAL(m, 1), s##m##1); \
        _mm512_storeu_si512(PARTIAL(m, 2), s##m##2), _mm512_storeu_si512(PARTIAL(m, 3), s##m##3); \
    }

QK_INLINE void segment(int tokens, const uint8_t *w, const int8_t *x, int64_t stride, int64_t quads, int32_t *partial,
                       int first) {
    const __m512i zero = _mm512_setzero_si512();
    int32_t four;
    START(0) START(1) START(2) START(3) START(4) START(5)
    for (int64_t q = 0; q < quads; q++, w += QUAD_BYTES) {
        __m512i v0 = _mm512_loadu_si512(w), v1 = _mm512_loadu_si512(w + 64);
        __m512i v2 = _mm512_loadu_si512(w + 128), v3 = _mm512_loadu_si512(w + 192);
        STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5)
    }
    END(0) END(1) END(2) END(3) END(4) END(5)
}
#else
/* A vector of sums, one per output. `add_products` adds the products of four codes of each output with four inputs. */
#ifdef __aarch64__
typedef int32x4_t Sums;
QK_INLINE Sums add_products(Sums sums, Sums codes, int32_t inputs) {
    return vdotq_s32(sums, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(inputs));
}
#else
typedef __m256i Sums;
/* Bytes become 16-bit words, so that sums of products are exact. */
QK_INLINE Sums add_products(Sums sums, Sums codes, int32_t inputs) {
    __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(codes, 8);
    __m256i input = _mm256_set1_epi32(inputs);
    __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(input, 8), 8), high = _mm256_srai_epi16(input, 8);
    return _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(even, low), _mm256_madd_epi16(odd, high)));
}
#endif

enum { PARTS = 64 / sizeof(Sums) }; /* vectors of sums in a block */
#define UNROLL_PARTS _Pragma("GCC unroll 16")

/* Multiply `blocks` blocks of 16 outputs from `block` on. */
QK_INLINE void segment_blocks(int tokens, int block, int blocks, const uint8_t *w, const int8_t *x, int64_t stride,
                              int64_t quads, int32_t *partial, int first) {
    Sums sums[MAX_TOKENS][4 * PARTS], zero = {0};
    w += 64 * block, partial += 16 * block;
    UNROLL for (int m = 0; m < tokens; m++)
        UNROLL_PARTS for (int i = 0; i < blocks * PARTS; i++) {
            sums[m][i] = zero;
            if (!first) memcpy(&sums[m][i], (uint8_t *)(partial + QK_PANEL * m) + i * sizeof(Sums), sizeof(Sums));
        }
    for (int64_t q = 0; q < quads; q++, w += QUAD_BYTES) {
        UNROLL_PARTS for (int i = 0; i < blocks * PARTS; i++) {
            Sums codes;
            memcpy(&codes, w + i * sizeof(Sums), sizeof(Sums));
            UNROLL for (int m = 0; m < tokens; m++) {
                int32_t inputs;
                memcpy(&inputs, x + m * stride + 4 * q, 4);
                sums[m][i] = add_products(sums[m][i], codes, inputs);
            }
        }
    }
    UNROLL for (int m = 0; m < tokens; m++)
        UNROLL_PARTS for (int i = 0; i < blocks * PARTS; i++)
            memcpy((uint8_t *)(partial + QK_PANEL * m) + i * sizeof(Sums), &sums[m][i], sizeof(Sums));
}

QK_INLINE void segment(int tokens, const uint8_t *w, const int8_t *x, int64_t stride, int64_t quads, int32_t *partial,
                       int first) {
    const int blocks = tokens == 1 ? 4 : tokens <= 3 ? 2 : 1;
    for (int block = 0; block < 4; block += blocks)
        segment_blocks(tokens, block, blocks, w, x, stride, quads, partial, first);
}
#endif

#define DEFINE(tokens) \
    static void segment_##tokens(const uint8_t *w, const int8_t *x, int64_t stride, int64_t quads, int32_t *partial, \
                                 int first) { \
        segment(tokens, w, x, stride, quads, partial, first); \
    }
DEFINE(1)
DEFINE(2)
DEFINE(3)
DEFINE(4)
DEFINE(5)
DEFINE(6)
static Segment *const SEGMENTS[] = {segment_1, segment_2, segment_3, segment_4, segment_5, segment_6};

/* Add the sums of a group to main, for `count` tokens from `token` on and blocks first..last. stride: distance between
   the sums of two tokens. */
QK_INLINE void add_group(const Job *job, int64_t panel, int64_t group, int64_t token, int64_t count, int first, int last,
                         const int32_t *partial, int64_t stride, float *main) {
    const QkLinear *linear = job->linear;
    int64_t index = (panel * job->groups + group) * QK_PANEL;
    for (int b = first; b < last; b++) {
        __m512 scale = qk_load_scale(linear, index + 16 * b);
        __m512i offset = _mm512_set1_epi32(QK_OFFSET);
        if (linear->zero) {
            __m128i zero = _mm_loadu_si128((const __m128i *)((const int8_t *)linear->zero + index + 16 * b));
            offset = _mm512_add_epi32(offset, _mm512_cvtepi8_epi32(zero));
        }
        for (int64_t m = 0; m < count; m++) {
            __m512i inputs = _mm512_set1_epi32(job->sums[(token + m) * job->groups + group]);
            __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(partial + stride * m + 16 * (b - first)),
                                           _mm512_mullo_epi32(offset, inputs));
            float *to = main + QK_PANEL * m + 16 * b;
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_loadu_ps(to)));
        }
    }
}

/* Multiply quads start..end of a panel with `tokens` tokens from `token` on. */
static void multiply(const Job *job, int64_t panel, int64_t start, int64_t end, int64_t token, int64_t tokens,
                     int32_t *partial, float *main) {
    int64_t width = job->linear->group / 4, blocks = (tokens + MAX_TOKENS - 1) / MAX_TOKENS, stride = job->quads * 4;
    const uint8_t *w = job->linear->codes + panel * job->quads * QUAD_BYTES;
    for (int64_t i = 0; i < blocks; i++) {
        QkRange range = qk_share(tokens, (int)i, (int)blocks);
        int64_t count = range.last - range.first, shift = range.first * QK_PANEL;
        const int8_t *x = job->x + (token + range.first) * stride;
        for (int64_t q = start; q < end;) {
            int64_t group = q / width, stop = qk_min(end, (group + 1) * width);
            SEGMENTS[count - 1](w + q * QUAD_BYTES, x + 4 * q, stride, stop - q, partial + shift, q == group * width);
            if (stop == (group + 1) * width)
                add_group(job, panel, group, token + range.first, count, 0, 4, partial + shift, QK_PANEL, main + shift);
            q = stop;
        }
    }
}

static void one_panel(const Job *job, int64_t panel, int64_t token, int64_t tokens, float *memory) {
    float *main = memory;
    int32_t *partial = (int32_t *)(memory + QK_ROWS * QK_PANEL);
    memset(main, 0, (size_t)(tokens * QK_PANEL) * sizeof(float));
    /* Many tokens are multiplied with one piece of the panel at a time, which fits the first-level cache. */
    int64_t step = tokens <= MAX_TOKENS ? job->quads : TILE_QUADS;
    for (int64_t start = 0; start < job->quads; start += step)
        multiply(job, panel, start, qk_min(job->quads, start + step), token, tokens, partial, main);
    qk_store_tokens(job->product, panel, token, tokens, main, job->row_scale);
}

#if QK_AMX
/* Like one_panel, but with tiles; integer sums are the same in any order. */
static void one_panel_by_tiles(const Job *job, int64_t panel, int64_t token, int64_t tokens, float *main) {
    int64_t width = job->linear->group / 4;
    const uint8_t *w = job->linear->codes + panel * job->quads * QUAD_BYTES;
    int32_t sums[SQUARE * SQUARE] __attribute__((aligned(64)));
    memset(main, 0, (size_t)(tokens * QK_PANEL) * sizeof(float));
    for (int64_t group = 0; group < job->groups; group++, w += width * QUAD_BYTES) {
        if (!job->packed) {
            const int8_t *x = job->x + (token * job->quads + group * width) * 4;
            QK_MULTIPLY_STRIP(_tile_dpbsud, w, x, 4 * job->quads, job->step, width, sums);
            add_group(job, panel, group, token, tokens, 0, 4, sums, QK_PANEL, main);
            continue;
        }
        for (int64_t m = 0; m < tokens; m += SQUARE) {
            const uint8_t *x = job->packed + ((token + m) * job->quads + 16 * group * width) * 4;
            for (int block = 0; block < 4; block += 2) {
                QK_MULTIPLY_SQUARE(_tile_dpbsud, w + 64 * block, x, 64 * job->quads, job->step, width, sums);
                add_group(job, panel, group, token + m, qk_min(SQUARE, tokens - m), block, block + 2, sums, SQUARE,
                          main + m * QK_PANEL);
            }
        }
    }
    qk_store_tokens(job->product, panel, token, tokens, main, job->row_scale);
}
#endif

/* Prepare the inputs for tiles if the product uses tiles. Returns 0, or 1 if out of memory. */
static int prepare_tiles(Job *job, int threads) {
#if QK_AMX
    int64_t group = job->linear->group;
    int fits = job->tokens >= FOR_TILES && job->groups * group == job->quads * 4 && qk_has_amx();
    job->step = fits ? qk_tile_step(group / 4) : 0;
    if (!job->step || job->tokens <= 16) return 0;
    job->packed = qk_pack(job->x, job->tokens, job->quads, job->step, threads);
    return !job->packed;
#else
    (void)job, (void)threads;
    return 0;
#endif
}

static int run_panels(const Job *job, QkRange range) {
    float *memory = qk_scratch(QK_SLOT_LINEAR_PANEL, 2 * sizeof(float) * QK_PANEL * QK_ROWS);
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

static int32_t sum_codes(const int8_t *codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += codes[i];
    return sum;
}

/* Set the sizes of a product, and get memory of the calling thread for its inputs. Returns 0, or 1 if out of memory. */
static int begin(Job *job, const QkProduct *product) {
    const QkLinear *linear = product->linear;
    int64_t tokens = product->tokens, quads = (linear->k + 3) / 4;
    *job = (Job){.product = product, .linear = linear, .tokens = tokens, .quads = quads,
                 .groups = (quads * 4 + linear->group - 1) / linear->group};
    job->x = qk_scratch(QK_SLOT_LINEAR_INPUT, (size_t)(tokens * quads * 4));
    job->row_scale = qk_scratch(QK_SLOT_LINEAR_SCALES, (size_t)tokens * sizeof(float));
    job->sums = qk_scratch(QK_SLOT_LINEAR_SUMS, (size_t)(tokens * job->groups) * sizeof(int32_t));
    return !job->x || !job->row_scale || !job->sums;
}

static void quantize_token(const Job *job, int64_t m) {
    const QkProduct *product = job->product;
    int64_t k = job->linear->k, group = job->linear->group, padded = job->quads * 4;
    const uint8_t *row = (const uint8_t *)product->x + m * k * (product->is_bf16 ? 2 : 4);
    job->row_scale[m] = qk_quantize_int8(row, product->is_bf16, k, padded, job->x + m * padded);
    for (int64_t g = 0; g < job->groups; g++)
        job->sums[m * job->groups + g] = sum_codes(job->x + m * padded + g * group, qk_min(group, padded - g * group));
}

int qk_linear_int8_share(const QkProduct *product, int thread, int threads) {
    QkRange panels = qk_share(qk_panels(product), thread, threads);
    Job job;
    if (panels.first == panels.last) return 0;
    if (begin(&job, product)) return 1;
    for (int64_t m = 0; m < job.tokens; m++) quantize_token(&job, m);
    return prepare_tiles(&job, 1) || run_panels(&job, panels);
}

/* Like qk_linear, but the input is always quantized to int8. */
QK_EXPORT int qk_linear_int8(const QkLinear *linear, const void *x, void *out, int64_t tokens, int is_bf16,
                             int activation, int threads) {
    QkProduct product = {linear, x, out, linear->n, tokens, is_bf16, activation};
    Job job;
    if (!tokens) return 0;
    if (begin(&job, &product)) return 1;
    threads = qk_threads(&product, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens >= 8)
    for (int64_t m = 0; m < tokens; m++) quantize_token(&job, m);
    if (prepare_tiles(&job, threads)) return 1;
    QK_RUN_PANELS(run_panels, &job, threads)
}
