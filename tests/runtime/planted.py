"""Work of checks that is right, wrong, or has no end; in a module of its own, from which a child unpickles it."""

from __future__ import annotations

import os
import signal
import time

import torch

from quantkit.kernels import gpu


def is_kernel() -> bool:
    """Whether it is the kernels' turn, as `Check.error` says it."""
    return os.environ["QUANTKIT_TRITON"] == "1"


def right(device):
    yield torch.ones(3)
    yield torch.arange(4)


def chatty(device):
    """As libraries that greet, in Python and in C."""
    print('a library greets\n["ops: chatty", 1.0]')
    os.write(1, b"and does not end its line")
    yield torch.ones(3)


def wrong(device):
    yield torch.ones(3)
    yield torch.tensor([1.0, 2.0, 4.0 if is_kernel() else 5.0])


def infinite(device):
    yield torch.tensor([1.0, float("nan") if is_kernel() else 1.0])


def crash(device):
    yield torch.ones(3)
    if is_kernel():
        os.kill(os.getpid(), signal.SIGSEGV)


def fail(device):
    """As what Triton refuses, for which torch stands in elsewhere."""
    yield torch.ones(3)
    if gpu._measuring:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hang(device):
    time.sleep(100)
    yield torch.ones(3)
