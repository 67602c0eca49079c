/* The compiler finds this file on aarch64 in the place of x86's header: C files include the same name on every CPU. */
#include <arm_neon.h>
