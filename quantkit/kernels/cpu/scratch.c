/* Scratch memory of each thread, kept until the process ends; and the instructions that this library and machine
   have. */
#include "amx.h"
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* Whether this library multiplies bf16 without conversion. */
QK_EXPORT int qk_has_avx512(void) { return QK_AVX512; }

int qk_has_amx(void) {
#if QK_AMX
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int allowed = -1;
    if (allowed < 0) allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return allowed;
#else
    return 0;
#endif
}
