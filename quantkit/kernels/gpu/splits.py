# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201
"""Splitting of a product along K when its tiles do not fill the chip: number of splits, and the sum of their partials.

Each program stores its partial sums. The program that finishes last reads all of them, always in the same order, and
writes the outputs.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILES = 1 << 14
"""Maximum number of tiles of a product that is split, because each needs a counter. More tiles fill any chip."""

_MOST_SPLITS = 64


@triton.jit
def is_last_to_come(counter, num_splits):
    """Whether all other programs of the tile have stored their partial sums. The last program resets the counter to
    zero.
    """
    tl.debug_barrier()  # all threads must store their numbers before one of them counts
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


def splits_of(tiles: int, blocks: int, programs: int) -> int:
    """Return the number of splits of K that gives about `programs` programs; every split has at least one block."""
    most = max(1, min(programs // max(tiles, 1), blocks, _MOST_SPLITS))
    splits = 1 << (most.bit_length() - 1)
    return -(-blocks // -(-blocks // splits))


def counters(device: torch.device) -> Tensor:
    """Return the counters of each tile's finished splits. Launches of a stream run in order, and each leaves zeros.

    Args:
        device: device of the counters.
    Returns:
        (MOST_TILES,) int32, shared by all split kernels of a stream.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _counters_of(device, stream)


@functools.cache  # never freed: captured graphs keep the address
def _counters_of(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
