"""What the kernels that read and write pages are told about them: numbers for types, widths, strides.

Not here: where arrays lie in a page (`kernels.layouts`) and how numbers are rounded (`kernels.kv_numbers`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.attention import AttentionOptions
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import capability, num_processors, power_of_two
from quantkit.kernels.gpu.choices import Decode
from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.numerics.dtype import FP8, INT4, INT8, DType

PLAIN, E4M3, BYTE, NIBBLE = range(4)
FIXED, TOKEN, CHANNEL = range(3)
KINDS: dict[DType | None, int] = {None: PLAIN, FP8: E4M3, INT8: BYTE, INT4: NIBBLE}
GRANULARITIES = {"tensor": FIXED, "head": FIXED, "token": TOKEN, "channel": CHANNEL}

FP8_CAPABILITY = 89
"""From which on a chip converts e4m3 itself."""

_BY_HAND = 256.0  # what e4m3 decoded by hand is too small by


def width(array: PagedArray, channels: int) -> int:
    """Elements of a stored row: half the channels where two share a byte."""
    return channels // 2 if array.scheme.dtype is INT4 else channels


def block(elements: int) -> int:
    """A tile's width: a power of two that tensor cores take."""
    return max(16, power_of_two(elements))


def granularity(array: PagedArray) -> int:
    """What shares a scale, as the kernels number it."""
    return FIXED if array.scheme.dtype is None else GRANULARITIES[array.scheme.granularity]


def unit(array: PagedArray, native_fp8: bool) -> float:
    """What decoded numbers of an array are too small by."""
    return _BY_HAND if array.scheme.dtype is FP8 and not native_fp8 else 1.0


def fixed(array: PagedArray) -> Tensor:
    """(H,) float32, what decoded numbers of each head are multiplied with; ones where there is nothing."""
    return _ones(array.codes.shape[1], array.codes.device) if array.fixed is None else array.fixed


@functools.cache
def _ones(heads: int, device: torch.device) -> Tensor:
    """Made once, so that a recorded graph finds it again."""
    return torch.ones(heads, dtype=torch.float32, device=device)


def strides(array: PagedArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of codes by page, head and token, and of scales by page and head."""
    return array.codes.stride()[:3], (0, 0) if array.scale is None else array.scale.stride()[:2]


def num_parts(programs: int, tokens: int, choice: Decode, device: torch.device) -> int:
    """Parts of a sequence, so that the chip is full and a part has some tiles; a power of two."""
    wanted = -(-choice.programs * num_processors(device) // programs)
    filled = power_of_two(-(-tokens // (choice.least_tiles * choice.tile)))
    return min(power_of_two(wanted), filled, choice.most_parts)


def arguments(
    query: Tensor, key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch, options: AttentionOptions,
    out: Tensor, memory: tuple[Tensor | None, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What kernels of attention are told in the same words.

    Args:
        query, key, value, views, batch, options, out: see `paged_decode.attend`.
        memory: see `parts.scratch`.
    Returns:
        tensors, strides and numbers, in the order in which kernels have them; constants by name.
    """
    layout, tail = views.layout, views.key_tail
    native = capability(query.device) >= FP8_CAPABILITY
    group = query.shape[1] // layout.num_heads
    k_width, v_width = width(views.key, layout.head_dim), width(views.value, layout.value_width)
    tensors = (
        query, key, value, tail, batch.tail_rows, batch.page_table, batch.query_starts, batch.positions, options.sinks,
        out, *memory,
        views.key.codes, views.key.scale, views.key.zero, views.value.codes, views.value.scale, views.value.zero,
        query.stride()[:2], key.stride()[:2], value.stride()[:2], (0, 0, 0) if tail is None else tail.stride()[:3],
        out.stride()[:2], batch.page_table.stride(0), *strides(views.key), *strides(views.value),
        float(options.scale), fixed(views.key), fixed(views.value), unit(views.key, native), unit(views.value, native),
        float(options.softcap or 1.0), int(options.window or 0),
    )  # fmt: skip
    constants = {
        "K_KIND": KINDS[views.key.scheme.dtype],
        "K_GRANULARITY": granularity(views.key),
        "V_KIND": KINDS[views.value.scheme.dtype],
        "V_GRANULARITY": granularity(views.value),
        "NATIVE_FP8": native,
        "HAS_TAIL": tail is not None,
        "TAIL": max(1, layout.tail_tokens),
        "HAS_WINDOW": options.window is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_SINKS": options.sinks is not None,
        "GROUP": group,
        "LANES": power_of_two(group),
        "K_WIDTH": k_width,
        "K_BLOCK": block(k_width),
        "V_WIDTH": v_width,
        "V_BLOCK": block(v_width),
        "WIDTH": layout.value_width,
        "BLOCK": power_of_two(layout.value_width),
        "PAGE": layout.page_size,
    }
    return tensors, constants
