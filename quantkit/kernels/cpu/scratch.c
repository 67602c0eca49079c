/* Scratch memory by thread; kept until the thread ends with the process. */
#include "quantkit.h"
#include <stdlib.h>

static __thread struct { void *memory; size_t bytes; } slots[QK_NUM_SLOTS];

void *qk_scratch(int slot, size_t bytes) {
    if (!slots[slot].memory || slots[slot].bytes < bytes) {
        free(slots[slot].memory);
        size_t rounded = (bytes + 4096) / 4096 * 4096;
        slots[slot].memory = aligned_alloc(64, rounded);
        slots[slot].bytes = slots[slot].memory ? rounded : 0;
    }
    return slots[slot].memory;
}

/* Whether this library multiplies bf16 as it is. */
QK_EXPORT int qk_has_avx512(void) { return QK_AVX512; }
