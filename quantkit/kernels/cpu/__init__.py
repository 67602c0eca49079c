"""Optional kernels in C: all `*.c` files of this folder, compiled into one library; see `quantkit.native`.

To add a kernel: put `name.c` here, include `quantkit.h`, mark the function that Python calls `QK_EXPORT`, and call it
through `function`. The kernels are written for AVX-512 with BF16 and VNNI; `emulated.h` emulates these instructions
with AVX2 (`avx2.h`) or, on aarch64, with NEON (`neon.h`). Products use AMX if the CPU has it. Without the library,
torch does all the work.
"""

from pathlib import Path

from quantkit.native import Library

_LIBRARY = Library(Path(__file__).parent)
library, status, function, has_avx512 = _LIBRARY.get, _LIBRARY.status, _LIBRARY.function, _LIBRARY.has_avx512
