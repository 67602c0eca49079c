# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Programmatic dependent launch: a kernel starts beside the end of the one before it, and asks for its weights.

`QUANTKIT_PDL=1` switches it on, from Hopper on; until a GPU has measured it, it is off.

Why it is correct: `griddepcontrol.wait` returns when the kernel before has ended, with all that it wrote visible. Every
program of a kernel launched so waits before it reads an input, a partial sum or a counter, and before it writes
anything, as what it writes to may be memory that an earlier kernel still reads. What it asks for before is weights,
which nobody writes after loading, and they only go to the L2 cache, through which all writes go too. Since no program
ends without having waited, a kernel ends after the one before it, and so after all before that one; and a kernel
launched as usual starts when the one before it has ended, whichever way that one was launched.
Source: CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from quantkit.kernels.gpu import capability

_HOPPER = 90


def options(device: torch.device) -> dict[str, Any]:
    """Constants and options of a launch of a kernel that calls `wait_for_inputs`."""
    is_dependent = os.environ.get("QUANTKIT_PDL", "0") != "0" and capability(device) >= _HOPPER
    return {"DEPENDENT": True, "launch_pdl": True} if is_dependent else {"DEPENDENT": False}


@triton.jit
def _prefetch(at):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_inputs(words, outputs, first, last, num_words, SPAN: tl.constexpr, COUNT: tl.constexpr):
    """Ask for the first COUNT blocks of the words of outputs, then wait for what the kernel before writes.

    The next kernel may then come in wherever this one leaves room.
    """
    for number in tl.static_range(COUNT):
        block = tl.minimum(first + number, last - 1)
        _prefetch(words + outputs.to(tl.int64) * num_words + block * SPAN)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
