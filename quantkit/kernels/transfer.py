"""Transfer of small host arrays to a device: one asynchronous copy for all of them.

A copy from pageable memory makes the host wait for everything launched before it. So the arrays are first concatenated
in pinned memory. Torch allocates this memory and reuses a freed block only after all copies from it are done, so a step
never overwrites data that is still being copied. Decode steps with fixed addresses have their own pinned memory
(`runtime.engine.runner`).
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of 16 bytes, because Triton compiles a kernel again for addresses that are not."""
    return -(-num_bytes // 16) * 16


def send(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
    """Return the arrays as tensors on a device.

    Args:
        device: target device. For the CPU, nothing is copied: the tensors are views of the arrays.
        arrays: arrays of any shapes and numeric types; may be changed after the call unless the device is the CPU.
    Returns:
        A tensor of the same shape and type for each array. On a device other than the CPU, they share one memory block.
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
        # An empty tensor gives the dtype, because torch has no public table from numpy's dtypes to its own.
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in placed
    )
