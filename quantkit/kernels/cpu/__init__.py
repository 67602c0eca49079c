"""Kernels in C, optional: every `*.c` file of this folder, compiled into one library at first use (see `native`).

To add a kernel: put `name.c` here, include `quantkit.h`, mark its entry `QK_EXPORT`, and call it through `function`.
They are written for AVX-512 with BF16 and VNNI, and by `avx2.h` run with AVX2 too; without the library everything falls
back to torch.
"""

from pathlib import Path

from quantkit.native import Function as Function
from quantkit.native import Library

_LIBRARY = Library(Path(__file__).parent)
library, status, function, has_avx512 = _LIBRARY.get, _LIBRARY.status, _LIBRARY.function, _LIBRARY.has_avx512
