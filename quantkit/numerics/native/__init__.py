"""Optional C code of compression: every `*.c` file of this folder as one library (see `quantkit.native`).

What is done without it stands beside each call, in torch.
"""

from pathlib import Path

from quantkit.native import Function as Function
from quantkit.native import Library

_LIBRARY = Library(Path(__file__).parent)
library, status, function, has_avx512 = _LIBRARY.get, _LIBRARY.status, _LIBRARY.function, _LIBRARY.has_avx512
