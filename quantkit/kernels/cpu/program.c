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

/* An operation on the rows of a step, one row per sequence. Buffers are dense, except for `stride`. */
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
    const kv_batch *batch;    /* one new token per sequence */
    const int64_t *positions; /* of the new tokens in their texts */
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

/* One thread norms, rotates, attends and stores all heads that share a key head. */
static int run_attention(const Program *p, const Op *op, int thread, int threads) {
    const Attend *call = op->what;
    const kv_layer *layer = call->layer;
    int type = (int)p->type;
    int64_t width = layer->key.width, size = qk_state_bytes(type), heads = layer->heads;
    int64_t stride = (call->query_heads + 2 * heads) * width, group = call->query_heads / heads;
    char *query = (char *)op->x, *key = query + call->query_heads * width * size;
    attention a = {layer, p->batch, (uint8_t *)query, (uint8_t *)key, (uint8_t *)key + heads * width * size, op->out,
                   stride, stride, stride, call->query_heads, group, call->options->window,
                   (float)call->options->scale, (float)call->options->softcap, type};
    int failed = 0;
    /* Threads take tasks in turn, because sequences differ in length. */
    for (int64_t task = thread; task < p->batch->sequences * heads; task += threads) {
        int64_t sequence = task / heads, head = task % heads;
        for (int64_t i = 0; i <= group; i++) { /* the key head last */
            char *states = (i < group ? query + (head * group + i) * width * size : key + head * width * size) +
                           sequence * stride * size;
            if (call->query_norm)
                qk_norm_row(states, i < group ? call->query_norm : call->key_norm, states, width, type,
                            (float)call->eps, (float)call->offset);
            if (call->angles) {
                int64_t at = p->positions[sequence] * call->half;
                qk_rotate_head(states, (const float *)call->angles[0] + at, (const float *)call->angles[1] + at,
                               call->half, type);
            }
        }
        failed |= kv_attend_token(&a, sequence, head);
    }
    return failed;
}

static int run_op(const Program *p, const Op *op, int thread, int threads) {
    int64_t rows = p->batch->sequences;
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
