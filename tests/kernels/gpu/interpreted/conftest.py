"""What kernels compute, by Triton's interpreter; collected where that runs. `test_interpreted` says why it does not.

The interpreter computes bfloat16 wrongly and without saying so, hence float16 and float32 only; and an operation takes
milliseconds, hence few, small cases.
"""

from __future__ import annotations

import functools
import inspect

import pytest

from tests.kernels.gpu.interpreter import why_not

collect_ignore_glob = ["test_*.py"] if why_not() else []


@pytest.fixture(autouse=True, scope="package")
def known_builtins():
    """The interpreter searches Triton's modules at every call for what it replaces: a third of its time."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package):
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, builder, *scope):
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, *scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield
