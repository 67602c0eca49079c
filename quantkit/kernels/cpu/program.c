/* A decode step as one call: a list of operations over fixed buffers, run by one team of threads. See program.py.

   Threads are forked once per step. Between operations, they wait at a barrier that spins, because the next operation
   follows within microseconds. After a while they yield, because the thread that they wait for may have lost its
   core. */
#include "attention.h"
#include "product.h"
#include "ops.h"
#include <sched.h>
#include <stdatomic.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { NORM, LINEAR, LINEAR_INT8, ATTENTION, GATE, ADD };
enum { SPINS = 4000 }; /* a few tens of microseconds */

/* An operation on the rows of a step, one row per new token. Buffers are dense, except for `stride`. */
typedef struct {
    int64_t kind, meets;       /* meets: whether all threads must end it before the next operation begins */
    const void *what;          /* norm: weight; product: QkLinear; attention: Attend */
    const void *x;             /* input */
    void *residual;            /* norm: added to x, and replaced by the sum; NULL: none */
    void *out;
    int64_t width, stride;     /* norm, gate, add: channels of an output row; product: elements between output rows */
    int64_t choice;            /* product: type that inputs are rounded to; gate: activation */
    double eps, offset;
} Op;

/* `x` of the operation holds queries, keys and values of a token side by side. */
typedef struct {
    const kv_layer *layer;
    const attention_options *options;
    const void *query_norm, *key_norm; /* NULL: none */
    const void *const *angles;         /* cosines and sines by position; NULL: no rotation */
    int64_t query_heads, half;         /* half: half the number of channels that rotate */
    double eps, offset;
} Attend;

typedef struct {
    const Op *ops;
    int64_t count, type;      /* type: QK_F32 or QK_BF16 */
    const kv_batch *batch;
    const int64_t *positions; /* of the new tokens in their texts */
    int64_t rows;             /* new tokens of all sequences */
} Program;

typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int round;
    _Alignas(64) atomic_int failed;
} Team;

static void meet(Team *team, int threads, int *round) {
    int next = ++*round;
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->round, next, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->round, memory_order_acquire) != next; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

static void run_norm(const Op *op, int64_t rows, int type, int thread, int threads) {
    int64_t bytes = op->width * qk_state_bytes(type);
    QkRange own = qk_share(rows, thread, threads);
    for (int64_t row = own.first; row < own.last; row++) {
        const char *x = (const char *)op->x + row * bytes;
        char *out = (char *)op->out + row * bytes;
        if (op->residual) {
            char *sum = (char *)op->residual + row * bytes;
            qk_add_norm_row(x, sum, op->what, out, sum, op->width, type, (float)op->eps, (float)op->offset);
        } else
            qk_norm_row(x, op->what, out, op->width, type, (float)op->eps, (float)op->offset);
    }
}

/* A thread's share of the columns of each row. */
static QkRange own_columns(const Op *op, int thread, int threads) {
    QkRange blocks = qk_share((op->width + 15) / 16, thread, threads);
    return (QkRange){blocks.first * 16, qk_min(blocks.last * 16, op->width)};
}

static void run_add(const Op *op, int64_t rows, int type, int thread, int threads) {
    int64_t bytes = op->width * qk_state_bytes(type);
    QkRange columns = own_columns(op, thread, threads);
    for (int64_t row = 0; row < rows; row++)
        qk_add_row((char *)op->out + row * bytes, (const char *)op->x + row * bytes, columns, type);
}

static void run_gate(const Op *op, int64_t rows, int type, int thread, int threads) {
    int64_t bytes = op->width * qk_state_bytes(type);
    QkRange columns = own_columns(op, thread, threads);
    for (int64_t row = 0; row < rows; row++)
        qk_gate_row((const char *)op->x + 2 * row * bytes, (char *)op->out + row * bytes, op->width, columns,
                    (int)op->choice, type);
}

/* Norm and rotate the queries and the key of one row that belong to a key head. */
static void prepare_head(const Attend *call, const attention *a, int64_t head, int64_t position) {
    int64_t bytes = a->layer->key.width * qk_state_bytes(a->type), at = position * call->half;
    for (int64_t i = 0; i <= a->group; i++) { /* the key last */
        char *states = i < a->group ? (char *)a->query + (head * a->group + i) * bytes : (char *)a->key + head * bytes;
        if (call->query_norm)
            qk_norm_row(states, i < a->group ? call->query_norm : call->key_norm, states, a->layer->key.width, a->type,
                        (float)call->eps, (float)call->offset);
        if (call->angles)
            qk_rotate_head(states, (const float *)call->angles[0] + at, (const float *)call->angles[1] + at, call->half,
                           a->type);
    }
}

/* One thread norms, rotates, attends and stores all heads that share a key head. */
static int run_attention(const Program *p, const Op *op, int thread, int threads) {
    const Attend *call = op->what;
    const kv_layer *layer = call->layer;
    int type = (int)p->type;
    int64_t width = layer->key.width, size = qk_state_bytes(type), heads = layer->heads;
    int64_t stride = (call->query_heads + 2 * heads) * width;
    uint8_t *query = (uint8_t *)op->x, *key = query + call->query_heads * width * size;
    attention a = {layer, p->batch, query, key, key + heads * width * size, op->out, stride, stride, stride,
                   call->query_heads, call->query_heads / heads, call->options->window, (float)call->options->scale,
                   (float)call->options->softcap, type};
    int failed = 0;
    int64_t task = 0, start = 0;
    for (int64_t sequence = 0; sequence < p->batch->sequences; sequence++) {
        int64_t new = p->batch->query_lengths[sequence];
        for (int64_t head = 0; head < heads; head++) {
            /* Threads take tasks in turn, because sequences differ in length. */
            if (task++ % threads != thread)
                continue;
            for (int64_t row = start; row < start + new; row++) {
                attention one = a;
                one.query += row * stride * size, one.key += row * stride * size;
                prepare_head(call, &one, head, p->positions[row]);
            }
            failed |= kv_attend_head(&a, sequence, start, head);
        }
        start += new;
    }
    return failed;
}

static int run_op(const Program *p, const Op *op, int thread, int threads) {
    int64_t rows = p->rows;
    int type = (int)p->type;
    QkProduct product = {op->what, op->x, op->out, op->stride, rows, type == QK_BF16, (int)op->choice};
    switch (op->kind) {
    case NORM: run_norm(op, rows, type, thread, threads); return 0;
    case LINEAR: return qk_linear_share(&product, thread, threads);
    case LINEAR_INT8: return qk_linear_int8_share(&product, thread, threads);
    case ATTENTION: return run_attention(p, op, thread, threads);
    case ADD: run_add(op, rows, type, thread, threads); return 0;
    default: run_gate(op, rows, type, thread, threads); return 0;
    }
}

/* Run all operations. Returns 0, or 1 if out of memory. */
QK_EXPORT int qk_run_program(const Program *program, int threads) {
    Team team = {0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int thread = 0, present = 1, round = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num(), present = omp_get_num_threads();
#endif
        for (int64_t i = 0; i < program->count; i++) {
            const Op *op = program->ops + i;
            if (run_op(program, op, thread, present)) atomic_store(&team.failed, 1);
            if (op->meets && present > 1) meet(&team, present, &round);
        }
    }
    return atomic_load(&team.failed);
}
