/* Attention of new tokens to cached pages and to each other, for any mixture of lengths. The results are defined in
   quantkit/kernels/reference/attention.py.

   A task covers one key head and a few new tokens of one sequence. Each of its rows is one of these tokens with one of
   the query heads that share the key head. A task goes through the keys in blocks of at most 64 tokens. For each block,
   it dequantizes the keys once for all rows, computes scores, dequantizes the values, updates the online softmax and
   adds the values. If the cache is unquantized, a block may hold cached and new keys, and blocks begin at multiples of
   their length: the bits of a token's result then do not depend on how many tokens come before it in the same step. Otherwise the
   blocks of new keys follow those of cached ones. Codes are never multiplied by scales: scales per token multiply scores
   and softmax weights, and scales per channel multiply the query once per page. If the CPU has products of bf16, a bf16
   model ("half") multiplies codes, queries and weights in bf16, which holds codes exactly, and adds in float32; tasks
   with many rows do this in AMX tiles. Everything else is float32. */
#include "attention.h"
#include "attention_amx.h"
#include "attention_softmax.h"
#include "kv_half.h"

enum { ROWS = 32, ROWS_OF_TILES = 128 }; /* of a task; with more rows, AMX loads and transposes each block less often */
/* A sequence's tokens in a step with drafts, at most (kv_sizes.MAX_ROLLBACK + 1): verified drafts must have the same bits
   as tokens that come one by one. */
enum { MOST_VERIFIED = 17 };

typedef struct {
    int64_t sequence, start, first, count; /* new tokens first .. first + count; start: the first new token's row */
} task;

static int64_t whole_tiles(int64_t rows) { return (rows + 15) / 16 * 16; }

/* ---- the two products; `s->block` first holds keys, then values ---- */

/* Convert the codes of `tokens` tokens to numbers in `s->block`, from its row `at` on. */
static void load_block(const state *s, const uint8_t *codes, int64_t token_stride, int64_t at, int64_t tokens,
                       int64_t width, int64_t type, int64_t stride) {
#if QK_AVX512
    if (s->half) {
        kv_load_half(codes, token_stride, tokens, width, type, (uint16_t *)s->block + at * stride, stride);
        return;
    }
#endif
    kv_load(codes, token_stride, tokens, width, type, (float *)s->block + at * stride, stride);
}

static void score_block(const state *s, const char *query, int64_t tokens) {
    int64_t bytes = s->query_width * (s->half ? 2 : 4);
#if QK_AMX
    if (s->tiles) {
        int32_t *pairs = (int32_t *)(s->block + BLOCK * bytes);
        score_tiles(query, whole_tiles(s->rows), s->block, tokens, s->query_width, pairs, s->scores);
        return;
    }
#endif
    if (s->half)
        dot_rows(query, bytes, s->rows, s->block, bytes, tokens, bytes, s->scores, 1);
    else
        dot_rows(query, bytes, s->rows, s->block, bytes, tokens, bytes, s->scores, 0);
}

static void add_block(const state *s, int64_t tokens) {
    const char *weights = (const char *)s->scores;
    int64_t width = s->value_width, stride = BLOCK * sizeof(float);
#if QK_AVX512
    if (s->half) {
        char *pairs = s->block + BLOCK * width * 2;
        kv_pair_tokens((const uint16_t *)s->block, width, tokens, width, (uint16_t *)pairs);
#if QK_AMX
        if (s->tiles) {
            add_value_tiles((char *)s->scores, whole_tiles(s->rows), pairs, tokens, width, s->out);
            return;
        }
#endif
        add_rows(weights, stride, s->rows, pairs, (tokens + 1) / 2, width, s->out, 1);
        return;
    }
#endif
    add_rows(weights, stride, s->rows, s->block, tokens, width, s->out, 0);
}

/* ---- blocks ---- */

/* Load the scales and zeros of `tokens` tokens from `token` of a page on, as those of the block's tokens from `at` on.
   Unused lanes become 0, because a weight of 0 times an undefined number may be NaN. */
static void load_scales(block *b, int64_t at, const kv_layer *layer, const kv_array *array, int64_t page, int64_t head,
                        int64_t token, int64_t tokens) {
    b->has_scale = array->granularity == KV_TOKEN || (array->granularity == KV_TENSOR && array->fixed);
    b->has_zero = array->granularity == KV_TOKEN && array->zero >= 0;
    for (int64_t t = 0; t < tokens; t += 16) {
        __mmask16 lanes = qk_lanes(t, tokens);
        if (array->granularity == KV_TOKEN)
            _mm512_storeu_ps(b->scale + at + t,
                             qk_load_state(kv_scales(layer, array, array->scale, page, head, token), t, QK_F16, lanes));
        else if (b->has_scale)
            _mm512_storeu_ps(b->scale + at + t, _mm512_maskz_mov_ps(lanes, _mm512_set1_ps(array->fixed[head])));
        if (b->has_zero)
            _mm512_storeu_ps(b->zero + at + t,
                             qk_load_state(kv_scales(layer, array, array->zero, page, head, token), t, QK_F16, lanes));
    }
}

/* Fold the channel scales and zeros of a page into the queries: scaled = query * scale, bias = query . zero. */
static void fold_channels(const attention *a, state *s, int64_t page, int64_t head) {
    const kv_array *key = &a->layer->key;
    const uint16_t *scale = kv_scales(a->layer, key, key->scale, page, head, 0);
    const uint16_t *zero = kv_scales(a->layer, key, key->zero, page, head, 0);
    for (int64_t row = 0; row < s->rows; row++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < s->query_width; k += 16) {
            __mmask16 lanes = qk_lanes(k, key->width);
            __m512 q = _mm512_loadu_ps(s->query + row * s->query_width + k);
            sum = _mm512_fmadd_ps(q, qk_load_state(zero, k, QK_F16, lanes), sum);
            qk_store_state(s->scaled, row * s->query_width + k, s->half ? QK_BF16 : QK_F32, 0xFFFF,
                           _mm512_mul_ps(q, qk_load_state(scale, k, QK_F16, lanes)));
        }
        s->bias[row] = _mm512_reduce_add_ps(sum);
    }
    s->folded_page = page;
}

static void unfold(state *s) {
    memset(s->bias, 0, (size_t)s->rows * sizeof(float));
    s->folded_page = -1;
}

static void soften_block(const attention *a, const state *s, const block *keys, const block *values, int64_t position) {
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t own = position + row / a->group; /* position of the query */
        int64_t to = qk_min(keys->tokens, own + 1 - keys->position);
        int64_t from = a->window ? qk_max(0, own - a->window + 1 - keys->position) : 0;
        soften_row(s, row, keys, values, a->softcap, qk_min(from, qk_max(to, 0)), qk_max(to, 0));
    }
}

/* Load keys or values of a block from a sequence's residual window; they may wrap around the end of the window. */
static void load_residual(const attention *a, const task *t, const state *s, const kv_array *array, int64_t head,
                          block *b, int64_t stride) {
    const kv_layer *layer = a->layer;
    int64_t row = a->batch->residual_rows[t->sequence], width = array->width, type = layer->residual_type;
    int64_t size = kv_token_bytes(type, width);
    int64_t first = qk_min(b->tokens, layer->residual_tokens - b->position % layer->residual_tokens);
    load_block(s, kv_residual(layer, array, row, head, b->position), size, 0, first, width, type, stride);
    if (b->tokens > first)
        load_block(s, kv_residual(layer, array, row, head, b->position + first), size, first, b->tokens - first, width,
                   type, stride);
}

/* Load cached keys or values of a block from their pages. */
static void load_pages(const attention *a, const task *t, const state *s, const kv_array *array, int64_t head, block *b,
                       int64_t stride) {
    const kv_layer *layer = a->layer;
    const int32_t *pages = a->batch->page_table + t->sequence * a->batch->table_stride;
    for (int64_t at = 0, tokens; at < b->tokens; at += tokens) {
        int64_t page = pages[(b->position + at) / layer->page_size], token = (b->position + at) % layer->page_size;
        tokens = qk_min(layer->page_size - token, b->tokens - at);
        load_scales(b, at, layer, array, page, head, token, tokens);
        load_block(s, kv_codes(layer, array, page, head, token), kv_token_bytes(array->type, array->width), at, tokens,
                   array->width, array->type, stride);
    }
}

/* Rotate the sums of rotated values back, before values that are not rotated are added. */
static void turn_back(const attention *a, const state *s) {
    for (int64_t row = 0; row < s->rows; row++) {
        kv_turn(s->out + row * s->value_width, a->layer->value.width);
        kv_change_signs(s->out + row * s->value_width, a->layer->value.width);
    }
}

/* Whether blocks must not cross pages, because each page has channel scales. */
static int is_page_wise(const kv_layer *layer) { return layer->key.granularity == KV_CHANNEL; }

static int is_unquantized(const kv_layer *layer) {
    return layer->key.granularity == KV_NONE && layer->value.granularity == KV_NONE;
}

/* Attend to cached tokens start .. start + tokens, all in one page if `is_page_wise`. */
static void attend_cached(const attention *a, const task *t, state *s, int64_t head, int64_t start, int64_t tokens,
                          int64_t position) {
    const kv_layer *layer = a->layer;
    int64_t cached = position - t->first, number = start / layer->page_size;
    int is_incomplete = number >= cached / layer->page_size;
    int is_folded = layer->key.granularity == KV_CHANNEL && !is_incomplete;
    block keys = {.position = start, .tokens = tokens, .factor = 1}, values = keys;
    if (is_incomplete && layer->key.residual)
        load_residual(a, t, s, &layer->key, head, &keys, s->query_width);
    else
        load_pages(a, t, s, &layer->key, head, &keys, s->query_width);
    if (is_folded) {
        int64_t page = a->batch->page_table[t->sequence * a->batch->table_stride + number];
        if (s->folded_page != page)
            fold_channels(a, s, page, head);
    } else {
        unfold(s);
        keys.factor = s->half ? a->scale : 1;
    }
    score_block(s, is_folded ? s->scaled : s->plain, tokens);
    if (is_incomplete && layer->value.residual)
        load_residual(a, t, s, &layer->value, head, &values, s->value_width);
    else
        load_pages(a, t, s, &layer->value, head, &values, s->value_width);
    soften_block(a, s, &keys, &values, position);
    add_block(s, tokens);
}

/* Load a block's keys or values: cached ones from their pages, then new ones from `fresh`, whose tokens are
   `token_stride` elements apart. */
static void load_tokens(const attention *a, const task *t, const state *s, const kv_array *array, int64_t head,
                        const uint8_t *fresh, int64_t token_stride, int64_t cached, block *b, int64_t stride) {
    int64_t size = qk_state_bytes(a->type), old = qk_max(0, qk_min(b->tokens, cached - b->position));
    block part = *b;
    part.tokens = old;
    load_pages(a, t, s, array, head, &part, stride);
    if (old < b->tokens) {
        int64_t token = t->start + b->position + old - cached;
        load_block(s, fresh + (token * token_stride + head * array->width) * size, token_stride * size, old,
                   b->tokens - old, array->width, a->type, stride);
    }
}

/* Attend to tokens start .. start + tokens, which are all new or, in an unquantized cache, cached and new. */
static void attend_plain(const attention *a, const task *t, state *s, int64_t head, int64_t start, int64_t tokens,
                         int64_t position) {
    int64_t cached = position - t->first;
    block keys = {.position = start, .tokens = tokens, .factor = s->half ? a->scale : 1}, values = keys;
    unfold(s);
    load_tokens(a, t, s, &a->layer->key, head, a->key, a->key_stride, cached, &keys, s->query_width);
    score_block(s, s->plain, tokens);
    soften_block(a, s, &keys, &values, position);
    load_tokens(a, t, s, &a->layer->value, head, a->value, a->value_stride, cached, &values, s->value_width);
    add_block(s, tokens);
}

/* ---- tasks ---- */

static void load_queries(const attention *a, const task *t, state *s, int64_t head) {
    int64_t width = a->layer->key.width, size = qk_state_bytes(a->type);
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t token = t->start + t->first + row / a->group, query_head = head * a->group + row % a->group;
        const uint8_t *from = a->query + (token * a->query_stride + query_head * width) * size;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < s->query_width; k += 16) {
            __m512 raw = qk_load_state(from, k, a->type, qk_lanes(k, width));
            __m512 q = _mm512_mul_ps(raw, _mm512_set1_ps(a->scale));
            if (s->half)
                qk_store_state(s->plain, row * s->query_width + k, QK_BF16, 0xFFFF, raw);
            _mm512_storeu_ps(s->query + row * s->query_width + k, q);
            sum = _mm512_add_ps(sum, q);
        }
        s->query_sum[row] = _mm512_reduce_add_ps(sum);
        s->maximum[row] = -INFINITY;
    }
}

static void store_outputs(const attention *a, const task *t, state *s, int64_t head) {
    int64_t width = a->layer->value.width, size = qk_state_bytes(a->type);
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t token = t->start + t->first + row / a->group, query_head = head * a->group + row % a->group;
        __m512 factor = _mm512_set1_ps(1.0f / s->total[row]), zero = _mm512_set1_ps(s->zero_total[row]);
        uint8_t *to = a->out + (token * a->query_heads + query_head) * width * size;
        for (int64_t k = 0; k < width; k += 16) {
            __m512 sum = _mm512_add_ps(_mm512_loadu_ps(s->out + row * s->value_width + k), zero);
            qk_store_state(to, k, a->type, qk_lanes(k, width), _mm512_mul_ps(sum, factor));
        }
    }
}

/* Allocate the memory of a task. Returns 1, or 0 if out of memory. */
static int allocate_state(state *s, const attention *a, const task *t) {
    int64_t rows = t->count * a->group;
    /* Tiles sum in another order, so drafts must not use them: see MOST_VERIFIED. */
    int is_prompt = a->batch->query_lengths[t->sequence] > MOST_VERIFIED;
    int half = a->type == QK_BF16 && QK_AVX512, tiles = half && rows >= 16 && is_prompt && qk_has_amx();
    int64_t unit = half ? 32 : 16;
    int64_t wide = (a->layer->key.width + unit - 1) / unit * unit, deep = (a->layer->value.width + unit - 1) / unit * unit;
    int64_t widest = qk_max(wide, deep);
    int64_t held = tiles ? whole_tiles(rows) : rows;
    int64_t sizes[] = {held * wide, held * BLOCK, held * deep, rows, rows, rows, rows, rows,
                       held * wide, held * wide,  BLOCK * widest}; /* in floats; in bf16, pairs take half of `block` */
    void **fields[] = {(void **)&s->query,     (void **)&s->scores,     (void **)&s->out,       (void **)&s->maximum,
                      (void **)&s->total,     (void **)&s->zero_total, (void **)&s->query_sum, (void **)&s->bias,
                      (void **)&s->plain,     (void **)&s->scaled,     (void **)&s->block};
    size_t total = 0;
    for (int i = 0; i < 11; i++)
        total += (size_t)(sizes[i] + 15) / 16 * 64;
    char *memory = qk_scratch(QK_SLOT_ATTENTION_B, total);
    if (!memory)
        return 0;
    for (int i = 0; i < 11; i++) {
        *fields[i] = memory;
        memory += (size_t)(sizes[i] + 15) / 16 * 64;
    }
    s->half = half, s->tiles = tiles, s->rows = rows, s->query_width = wide, s->value_width = deep;
    s->plain = half ? s->plain : (char *)s->query;
    memset(s->out, 0, (size_t)(rows * deep) * sizeof(float));
    memset(s->total, 0, (size_t)rows * sizeof(float));
    memset(s->zero_total, 0, (size_t)rows * sizeof(float));
    return 1;
}

static int run_task(const attention *a, const task *t, int64_t head) {
    state s;
    if (!allocate_state(&s, a, t))
        return 1;
    int64_t size = a->layer->page_size, step = s.query_width > (s.half ? 128 : 64) ? BLOCK / 2 : BLOCK; /* fits in L1 */
    int64_t cached = a->batch->context_lengths[t->sequence] - a->batch->query_lengths[t->sequence];
    int64_t position = cached + t->first; /* position of the first query */
    int64_t seen = a->window ? qk_max(0, position - a->window + 1) : 0;
#if QK_AMX
    if (s.tiles) qk_shape_tiles(16, 16);
#endif
    load_queries(a, t, &s, head);
    unfold(&s);
    int64_t at = seen, last = position + t->count;
    int64_t turned = kv_is_turned(&a->layer->value) ? (a->layer->value.residual ? cached / size * size : cached) : -1;
    if (is_unquantized(a->layer))
        at -= at % step;
    else
        for (int64_t tokens; at < cached; at += tokens) {
            tokens = qk_min(is_page_wise(a->layer) ? qk_min(step, size - at % size) : step, cached - at);
            attend_cached(a, t, &s, head, at, tokens, position);
            if (at + tokens == turned)
                turn_back(a, &s);
        }
    for (; at < last; at += step)
        attend_plain(a, t, &s, head, at, qk_min(step, last - at), position);
#if QK_AMX
    if (s.tiles) _tile_release();
#endif
    store_outputs(a, t, &s, head);
    return 0;
}

/* How many new tokens a task has at most: ROWS or ROWS_OF_TILES rows, or one token. */
static int64_t tokens_per_task(const attention *a) {
    int64_t rows = QK_AMX && a->type == QK_BF16 && qk_has_amx() ? ROWS_OF_TILES : ROWS;
    return qk_max(1, rows / a->group);
}

/* Divide the batch into tasks. Returns their number, or -1 if out of memory. */
static int64_t cut_tasks(const attention *a, task **tasks, double *work) {
    const kv_batch *batch = a->batch;
    int64_t per_task = tokens_per_task(a), count = 0, start = 0;
    for (int64_t i = 0; i < batch->sequences; i++)
        count += (batch->query_lengths[i] + per_task - 1) / per_task;
    *tasks = qk_scratch(QK_SLOT_ATTENTION_A, (size_t)(count + 1) * sizeof(task));
    if (!*tasks)
        return -1;
    count = 0;
    for (int64_t i = 0; i < batch->sequences; i++) {
        int64_t length = batch->query_lengths[i];
        for (int64_t first = 0; first < length; first += per_task)
            (*tasks)[count++] = (task){i, start, first, qk_min(per_task, length - first)};
        *work += (double)length * (double)batch->context_lengths[i];
        start += length;
    }
    return count;
}

int kv_attend_head(const attention *a, int64_t sequence, int64_t start, int64_t head) {
    int64_t length = a->batch->query_lengths[sequence], per_task = tokens_per_task(a);
    for (int64_t first = 0; first < length; first += per_task) {
        task t = {sequence, start, first, qk_min(per_task, length - first)};
        if (run_task(a, &t, head))
            return 1;
    }
    kv_new_states states = {a->layer, a->batch, a->key, a->value, a->key_stride, a->value_stride, a->type};
    return kv_store_head(&states, sequence, start, head);
}

/* Below this many query-key pairs times channels, waking a second thread costs more than it saves. */
#define PARALLEL_WORK 2e6

/* Attend, then store keys and values. `out` is dense, (tokens, query_heads, value width). Returns 0, or 1 if out of
   memory. */
QK_EXPORT int qk_attend(const kv_layer *layer, const kv_batch *batch, const attention_options *options,
                        const void *query, const void *key, const void *value, void *out, int64_t query_stride,
                        int64_t key_stride, int64_t value_stride, int64_t query_heads, int type, int threads) {
    attention a = {layer, batch, query, key, value, out, query_stride, key_stride, value_stride,
                   query_heads, query_heads / layer->heads, options->window, (float)options->scale,
                   (float)options->softcap, type};
    task *tasks;
    double work = 0;
    int64_t count = cut_tasks(&a, &tasks, &work) * layer->heads;
    if (count < 0)
        return 1;
    int used = count == 1 || work * (double)(query_heads * layer->key.width) < PARALLEL_WORK ? 1 : threads;
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(used) if (used > 1) reduction(| : failed)
    for (int64_t i = 0; i < count; i++)
        failed |= run_task(&a, &tasks[i / layer->heads], i % layer->heads);
    kv_new_states states = {layer, batch, key, value, key_stride, value_stride, type};
    return failed || kv_store(&states, threads);
}
