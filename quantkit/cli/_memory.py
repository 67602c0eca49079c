"""Under a limit on the memory of a process (`ulimit -v`) a library may do worse than raise while it is imported.

OpenBLAS ends the process or tries again for ever, glibc aborts. So where there is such a limit, a child goes first.
"""

import importlib
import resource
import sys
from importlib.abc import MetaPathFinder

from quantkit.safety.child import ends_well

_TIMEOUT_S = 60.0
_HEAVY = ("numpy", "torch")


def guard_imports() -> None:
    """Have the first import of a heavy library tried by a child, if memory is limited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and not any(name in sys.modules for name in _HEAVY):
        sys.meta_path.insert(0, _Guard(limit))


class _Guard(MetaPathFinder):
    """Finds no module; is asked first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Raise MemoryError where the import of a heavy library would not end well."""
        if name in _HEAVY:
            # First of all: the child imports the same modules, and asks this finder again otherwise.
            sys.meta_path.remove(self)
            if not ends_well(lambda: list(map(importlib.import_module, _HEAVY)), seconds=_TIMEOUT_S):
                raise MemoryError(f"{self._limit} bytes (ulimit -v) are too few to import {name}")
