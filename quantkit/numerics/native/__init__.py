"""Optional C code for compression: all `*.c` files of this folder, compiled into one library (see `quantkit.native`).

Every caller has an alternative in torch for machines without a compiler.
"""

from pathlib import Path

from quantkit.native import Library

_LIBRARY = Library(Path(__file__).parent)
library, status, function, has_avx512 = _LIBRARY.get, _LIBRARY.status, _LIBRARY.function, _LIBRARY.has_avx512
