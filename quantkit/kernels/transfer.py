"""Small arrays of the host on their way to a device: one copy for all of them, which nobody waits for.

A copy from ordinary memory makes the host wait for everything that was launched before it. So the arrays are put one
behind another into pinned memory, and go from there. That memory is torch's: it keeps freed pinned blocks and hands
one out again only after the copies out of it are done, so a step never overwrites what the last one is still sending.
Not here: decode steps with fixed addresses, which have pinned memory of their own (`runtime.engine.runner`).
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def aligned(num_bytes: int) -> int:
    """Bytes up to where the next array may begin: Triton compiles a kernel anew for one that is not at 16 bytes."""
    return -(-num_bytes // 16) * 16


def send(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
    """The arrays as tensors on a device.

    Args:
        device: where to. On the CPU nothing is copied: the tensors are views.
        arrays: of any shapes and numeric types; elsewhere than on the CPU free to be changed on return.
    Returns:
        a tensor for each, of its shape and type; on a device they share one piece of memory.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(array) for array in arrays)
    return _in_one_piece(device, arrays)


def _in_one_piece(device: torch.device, arrays: tuple[Array, ...]) -> tuple[Tensor, ...]:
    *starts, size = itertools.accumulate((aligned(array.nbytes) for array in arrays), initial=0)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory, placed = host.numpy(), list(zip(starts, arrays, strict=True))
    for start, array in placed:
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = host.to(device, non_blocking=True)
    return tuple(
        # The dtype by way of an empty tensor: torch has no public table from numpy's names to its own.
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in placed
    )
