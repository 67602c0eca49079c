/* Conversion of a row-major weight (N, K) to the panels of linear.h. */
#include "linear.h"

enum { COLUMNS = 64 };  /* columns converted at once: a cache line of codes of each row */

/* Return the position of element (row, column) in a panel, in elements; four W4 codes share a word. */
QK_INLINE int64_t index_in_panel(int storage, int64_t row, int64_t column) {
    int64_t pair = column / 2, parity = column % 2, block = row / 16, lane = row % 16;
    switch (storage) {
        case QK_BF16: return pair * 128 + row * 2 + parity;
        case QK_F32:
        case QK_F16: return column * 64 + row;
        case QK_W4: return pair * 32 + lane * 2 + parity;
        case QK_H8: return pair * 128 + block / 2 * 64 + lane / 4 * 16 + block % 2 * 8 + lane % 4 * 2 + parity;
        case QK_U8: return column / 4 * 256 + row * 4 + column % 4;
        default: return pair * 128 + block / 2 * 64 + (lane * 2 + parity) * 2 + block % 2;
    }
}

QK_INLINE void put(int storage, uint8_t *panel, int64_t row, int64_t column, const uint8_t *weights, int64_t index) {
    int64_t to = index_in_panel(storage, row, column);
    int8_t code = (int8_t)weights[index];
    switch (storage) {
        case QK_F32: ((uint32_t *)panel)[to] = ((const uint32_t *)weights)[index]; break;
        case QK_F16:
        case QK_BF16: ((uint16_t *)panel)[to] = ((const uint16_t *)weights)[index]; break;
        case QK_W4: ((uint16_t *)panel)[to] |= (uint16_t)((uint16_t)(code + 8) << (row / 16 * 4)); break;
        case QK_H8: panel[to] = (uint8_t)(code ^ ((code >> 7) & 0x7f)); break;
        case QK_U8: panel[to] = (uint8_t)(code + QK_OFFSET); break;
        default: panel[to] = (uint8_t)code;
    }
}

QK_INLINE void lay_out(int storage, const uint8_t *weights, int64_t n, int64_t k, uint8_t *panels,
                       int64_t panel_bytes) {
    for (int64_t first = 0; first < n; first += QK_PANEL, panels += panel_bytes)
        for (int64_t start = 0; start < k; start += COLUMNS)
            for (int64_t row = first; row < qk_min(n, first + QK_PANEL); row++)
                for (int64_t column = start; column < qk_min(k, start + COLUMNS); column++)
                    put(storage, panels, row - first, column, weights, row * k + column);
}

/* panels: zeroed memory, panel_bytes per panel. Elements of `weights` have the size of their number type. */
QK_EXPORT void qk_linear_layout(int storage, const uint8_t *weights, int64_t n, int64_t k, uint8_t *panels,
                                int64_t panel_bytes) {
    switch (storage) {
#define EACH(kind) \
    case kind: lay_out(kind, weights, n, k, panels, panel_bytes); break;
        EACH(QK_BF16)
        EACH(QK_F32)
        EACH(QK_F16)
        EACH(QK_W4)
        EACH(QK_W8)
        EACH(QK_FP8)
        EACH(QK_H8)
        EACH(QK_U8)
    }
}
