/* Products of bf16 or of bytes with AMX tiles: up to 16 tokens x 64 outputs, or 32 tokens x 32 outputs, at a time.

   A panel of linear.h can be loaded as the right factor as it is: each row of a tile holds one unit of inputs for 16
   outputs. A unit is 4 bytes: two bf16 numbers or four int8 codes. A tile of the left factor holds up to 16 tokens. */
#pragma once
#include "quantkit.h"

/* Whether this library multiplies with AMX tiles. The first call asks the operating system for permission. */
QK_EXPORT int qk_has_amx(void);

#if QK_AVX512 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define QK_AMX 1

enum { SQUARE = 32 };
#define QK_FENCE __asm__ volatile("" ::: "memory") /* gcc does not know that tiles are loaded from memory */

/* Return the number of units that are multiplied at once: 16 (a whole tile), 8, or 0 if neither divides `width`, the
   number of units in a group. */
QK_INLINE int64_t qk_tile_step(int64_t width) { return width % 16 == 0 ? 16 : width % 8 == 0 ? 8 : 0; }

/* Configure this thread's tiles; the caller must call `_tile_release` after the last product. Tiles 0 to 3 hold sums, 4
   and 5 tokens, 6 and 7 outputs. */
QK_INLINE void qk_shape_tiles(int64_t step, int64_t tokens) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = (uint8_t)(i < 6 ? qk_min(16, tokens) : step);
        shapes.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * step : 64);
    }
    QK_FENCE;
    _tile_loadconfig(&shapes);
}

/* Pack the inputs of 32 tokens from `token` on as [block of 16 tokens][step][token][unit]; zeros replace missing
   tokens. */
QK_INLINE void qk_pack_tokens(const void *x, int64_t tokens, int64_t units, int64_t step, int64_t token, void *packed) {
    const uint8_t *from = x;
    for (int64_t m = token; m < token + SQUARE; m++) {
        uint8_t *to = (uint8_t *)packed + (m / 16 * 16 * units + m % 16 * step) * 4;
        for (int64_t u = 0; u < units; u += step, to += 64 * step) {
            if (m < tokens) memcpy(to, from + (m * units + u) * 4, (size_t)(4 * step));
            else memset(to, 0, (size_t)(4 * step));
        }
    }
}

/* Pack all inputs for tiles into scratch memory of the calling thread. Returns NULL if out of memory. */
static inline const uint8_t *qk_pack(const void *x, int64_t tokens, int64_t units, int64_t step, int threads) {
    uint8_t *packed = qk_scratch(QK_SLOT_LINEAR_TILES, (size_t)((tokens + SQUARE - 1) / SQUARE * SQUARE * 4 * units));
    if (!packed) return NULL;
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")
    for (int64_t m = 0; m < tokens; m += SQUARE) qk_pack_tokens(x, tokens, units, step, m, packed);
    return packed;
}

#define QK_CLEAR_SUMS \
    _tile_zero(0); \
    _tile_zero(1); \
    _tile_zero(2); \
    _tile_zero(3); \
    QK_FENCE

/* Compute sums (32, 32) = x w' over `count` units, as floats or int32. w: two blocks of 16 outputs of a panel. x:
   packed tokens; the second block of 16 tokens begins `next` bytes after the first. multiply: _tile_dpbf16ps or
   _tile_dpbsud. */
#define QK_MULTIPLY_SQUARE(multiply, w, x, next, step, count, sums) \
    do { \
        const uint8_t *right = (const uint8_t *)(w), *left = (const uint8_t *)(x); \
        QK_CLEAR_SUMS; \
        for (int64_t unit = 0; unit < (count); unit += (step), right += 256 * (step), left += 64 * (step)) { \
            _tile_loadd(4, left, 4 * (step)); \
            _tile_loadd(6, right, 256); \
            multiply(0, 4, 6); \
            _tile_loadd(7, right + 64, 256); \
            multiply(1, 4, 7); \
            _tile_loadd(5, left + (next), 4 * (step)); \
            multiply(2, 5, 6); \
            multiply(3, 5, 7); \
        } \
        _tile_stored(0, (sums), 4 * SQUARE); \
        _tile_stored(1, (sums) + 16, 4 * SQUARE); \
        _tile_stored(2, (sums) + 16 * SQUARE, 4 * SQUARE); \
        _tile_stored(3, (sums) + 16 * SQUARE + 16, 4 * SQUARE); \
        QK_FENCE; \
    } while (0)

/* Compute sums (tokens, 64) for at most 16 tokens and a whole panel. x: not packed, `stride` bytes per token. */
#define QK_MULTIPLY_STRIP(multiply, w, x, stride, step, count, sums) \
    do { \
        const uint8_t *right = (const uint8_t *)(w), *left = (const uint8_t *)(x); \
        QK_CLEAR_SUMS; \
        for (int64_t unit = 0; unit < (count); unit += (step), right += 256 * (step), left += 4 * (step)) { \
            _tile_loadd(4, left, (stride)); \
            _tile_loadd(6, right, 256); \
            multiply(0, 4, 6); \
            _tile_loadd(7, right + 64, 256); \
            multiply(1, 4, 7); \
            _tile_loadd(6, right + 128, 256); \
            multiply(2, 4, 6); \
            _tile_loadd(7, right + 192, 256); \
            multiply(3, 4, 7); \
        } \
        _tile_stored(0, (sums), 256); \
        _tile_stored(1, (sums) + 16, 256); \
        _tile_stored(2, (sums) + 32, 256); \
        _tile_stored(3, (sums) + 48, 256); \
        QK_FENCE; \
    } while (0)
#else
#define QK_AMX 0
#endif
