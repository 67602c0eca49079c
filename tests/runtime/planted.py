"""Cases of the kernels' self-test that are right, wrong, or have no end; a child plants them."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from quantkit.kernels import gpu
from quantkit.runtime.engine import kernel_check


def is_kernel() -> bool:
    """Whether it is the kernels' turn, as `kernel_check.error_of` says it."""
    return os.environ["QUANTKIT_TRITON"] == "1"


def right(device, dtype):
    yield torch.ones(3)
    yield torch.arange(4)


def chatty(device, dtype):
    """As libraries that greet, in Python and in C."""
    print('a library greets\n["chatty", 1.0]')
    os.write(1, b"and does not end its line")
    yield torch.ones(3)


def wrong(device, dtype):
    yield torch.ones(3)
    yield torch.tensor([1.0, 2.0, 4.0 if is_kernel() else 5.0])


def infinite(device, dtype):
    yield torch.tensor([1.0, float("nan") if is_kernel() else 1.0])


def crash(device, dtype):
    yield torch.ones(3)
    if is_kernel():
        os.kill(os.getpid(), signal.SIGSEGV)


def fail(device, dtype):
    """As Triton's refusal, for which torch stands in elsewhere."""
    yield torch.ones(3)
    if gpu._measuring:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hang(device, dtype):
    time.sleep(100)
    yield torch.ones(3)


def run_code(code: str, arguments: list[str], streams: list[str], environment: dict[str, str]) -> None:
    """What `python -c` does, in a process that has been forked."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    sys.argv = ["-c", *arguments]
    exec(code, {})


def plant(families: dict[str, str]) -> None:
    """Replace the cases of the self-test.

    Args:
        families: by family, names of functions here with commas between them.
    """
    kernel_check.CASES.clear()
    for family, names in families.items():
        kernel_check.CASES[family] = {name: globals()[name] for name in names.split(",")}
