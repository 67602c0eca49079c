/* The sums of products.c and fits.c, computed with AMX tiles: in another order, and several times as fast. */
#include "amx.h"
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#if QK_AMX

enum { PAIRS = 256, BLOCKS = 8, LEAST = 128 }; /* pairs multiplied at once; blocks turned at once; columns of a task */

/* Add at most (32, 32) of a product to `total`. `left` is turned; its blocks are PAIRS * 32 numbers apart. */
QK_INLINE void add_square(int tall, int wide, const uint16_t *left, const uint16_t *right, int64_t stride, int64_t pairs,
                          float *total, int64_t total_stride, int64_t rows, int64_t columns) {
    const int64_t whole = pairs / STEP;
    float sums[32 * 32] __attribute__((aligned(64)));
    for (int64_t r = 0; r < rows; r++) /* prefetched while the sums are computed */
        for (int b = 0; b < wide; b++) _mm_prefetch((const char *)(total + r * total_stride + 16 * b), _MM_HINT_T0);
    clear_tiles();
    for (int64_t s = 0; s < whole; s++)
        multiply_tiles(tall, wide, left + s * TILE, PAIRS * 32, right + s * TILE, stride);
    if (pairs % STEP) { /* the rest of the block belongs to other rows */
        uint16_t last[2 * TILE] __attribute__((aligned(64)));
        memset(last, 0, sizeof last);
        for (int b = 0; b < wide; b++)
            memcpy(last + b * TILE, right + b * stride + whole * TILE, (size_t)(pairs % STEP) * 64);
        QK_FENCE;
        multiply_tiles(tall, wide, left + whole * TILE, PAIRS * 32, last, TILE);
        QK_FENCE;
    }
    store_tiles(tall, wide, sums);
    for (int64_t r = 0; r < rows; r++)
        for (int b = 0; b < wide; b++) {
            const int64_t missing = columns - 16 * b;
            const __mmask16 mask = missing >= 16 ? 0xffff : (__mmask16)((1u << missing) - 1);
            float *own = total + r * total_stride + 16 * b;
            const __m512 sum = _mm512_load_ps(sums + r * 32 + 16 * b);
            _mm512_mask_storeu_ps(own, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, own), sum));
        }
}

/* Add at most (16 * BLOCKS, columns) of a product over at most PAIRS pairs to `total`. The diagonal starts in column
   `diagonal` of the first row; values above it need not be computed. */
static void add_part(const uint16_t *left, const uint16_t *right, int64_t left_block, int64_t right_block, int64_t pairs,
                     float *total, int64_t stride, int64_t rows, int64_t columns, int64_t diagonal) {
    uint16_t turned[BLOCKS * PAIRS * 32] __attribute__((aligned(64)));
    for (int64_t b = 0; 16 * b < rows; b++)
        for (int64_t p = 0; p < pairs; p += STEP)
            turn(left + b * left_block + 32 * p, pairs - p, turned + (b * PAIRS + p) * 32);
    QK_FENCE;
    for (int64_t c = 0; c < columns; c += 32)
        for (int64_t r = c <= diagonal ? 0 : (c - diagonal) / 32 * 32; r < rows; r += 32) {
            const int64_t height = rows - r < 32 ? rows - r : 32, width = columns - c < 32 ? columns - c : 32;
            const uint16_t *own = turned + r * PAIRS * 2, *others = right + c / 16 * right_block;
            float *sums = total + r * stride + c;
            if (height > 16 && width > 16) add_square(2, 2, own, others, right_block, pairs, sums, stride, height, width);
            else if (height > 16) add_square(2, 1, own, others, right_block, pairs, sums, stride, height, width);
            else if (width > 16) add_square(1, 2, own, others, right_block, pairs, sums, stride, height, width);
            else add_square(1, 1, own, others, right_block, pairs, sums, stride, height, width);
        }
    QK_FENCE;
}

void qk_add_products_amx(const uint16_t *left, const uint16_t *right, int64_t left_block, int64_t right_block,
                         int64_t tokens, float *total, int64_t rows, int64_t columns, int64_t lower, int threads) {
    const int64_t all = (tokens + 1) / 2, tall = 16 * BLOCKS, parts = (rows + tall - 1) / tall;
    int64_t wide = columns * parts / (8 * threads) / 32 * 32; /* so that the last tasks end at about the same time */
    wide = wide < LEAST ? LEAST : wide;
    for (int64_t from = 0; from < all; from += PAIRS) {
        const int64_t pairs = all - from < PAIRS ? all - from : PAIRS;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            shape_tiles(STEP);
#pragma omp for schedule(dynamic) collapse(2)
            for (int64_t r = 0; r < parts * tall; r += tall)
                for (int64_t c = 0; c < columns; c += wide) {
                    const int64_t height = rows - r < tall ? rows - r : tall, width = columns - c < wide ? columns - c : wide;
                    const int64_t diagonal = lower < 0 ? columns : lower + r - c;
                    if (diagonal + height <= 0) continue; /* the whole task is above the diagonal */
                    add_part(left + r / 16 * left_block + 32 * from, right + c / 16 * right_block + 32 * from, left_block,
                             right_block, pairs, total + r * columns + c, columns, height, width,
                             diagonal);
                }
            _tile_release();
        }
    }
}

/* Like `meet` of fits.c, for 16 * wide outputs. `hessian` is turned; a tile holds `step` pairs of a group. */
QK_INLINE void meet_tiles(int wide, const uint16_t *hessian, int64_t steps, const uint16_t *own, int64_t own_block,
                          int64_t step, const uint16_t *others, int64_t size, int64_t outputs, float *sums, int64_t count) {
    float products[32 * 32] __attribute__((aligned(64)));
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t c = 0; c < size; c += 32) {
        const int tall = size - c > 16 ? 2 : 1;
        const uint16_t *left = hessian + c / 16 * steps * TILE;
        clear_tiles();
        for (int64_t s = 0; s < steps; s++)
            if (tall > 1) multiply_tiles(2, wide, left + s * TILE, steps * TILE, own + s * step * 32, own_block);
            else multiply_tiles(1, wide, left + s * TILE, 0, own + s * step * 32, own_block);
        if (tall > 1) store_tiles(2, wide, products);
        else store_tiles(1, wide, products);
        for (int r = 0; r < 16 * tall; r++)
            UNROLL for (int b = 0; b < wide; b++) {
                const uint16_t *codes = others + (c + r) * outputs + 16 * b;
                const __m512i wider = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)codes));
                const __m512 product = _mm512_load_ps(products + r * 32 + 16 * b);
                total[b] = _mm512_fmadd_ps(product, _mm512_castsi512_ps(_mm512_slli_epi32(wider, 16)), total[b]);
            }
        QK_FENCE;
    }
    UNROLL for (int b = 0; b < wide; b++) {
        if (16 * b >= count) continue;
        _mm512_mask_storeu_ps(sums + 16 * b, count - 16 * b >= 16 ? 0xffff : (__mmask16)((1u << (count - 16 * b)) - 1), total[b]);
    }
}

int qk_normal_equations_amx(const uint16_t *codes, const uint16_t *packed, const uint16_t *hessian, float *normal,
                            int64_t first, int64_t groups, int64_t all, int64_t size, int64_t outputs, int64_t padded,
                            int threads) {
    const int64_t pairs = size / 2, of_group = padded * size, blocks = all * size / 16;
    int64_t step = STEP;
    while (pairs % step) step--;
    const int64_t steps = pairs / step;
    uint16_t *turned = size % 16 ? NULL : aligned_alloc(64, (size_t)(groups * blocks * steps * TILE) * sizeof(uint16_t));
    if (!turned) return 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t b = 0; b < groups * blocks; b++)
            for (int64_t s = 0; s < steps; s++)
                turn(hessian + (b * pairs + s * step) * 32, step, turned + (b * steps + s) * TILE);
        shape_tiles((int)step);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < outputs; n += 32)
            for (int64_t i = 0; i < groups; i++) {
                const uint16_t *own = packed + (first + i) * of_group + n * size;
                for (int64_t j = first + i; j < all; j++) {
                    const uint16_t *others = codes + j * size * padded + n;
                    const uint16_t *rows = turned + (i * blocks + j * size / 16) * steps * TILE;
                    float *sums = normal + (i * all + j) * outputs + n;
                    const int64_t left = outputs - n;
                    if (left > 16) meet_tiles(2, rows, steps, own, pairs * 32, step, others, size, padded, sums, left);
                    else meet_tiles(1, rows, steps, own, 0, step, others, size, padded, sums, left);
                }
            }
        _tile_release();
    }
    free(turned);
    return 1;
}

#endif

/* Whether this library multiplies with AMX tiles. The first call asks the operating system for permission. */
QK_EXPORT int qk_has_amx(void) {
#if QK_AMX
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int allowed = -1;
    if (allowed < 0) allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return allowed;
#else
    return 0;
#endif
}
