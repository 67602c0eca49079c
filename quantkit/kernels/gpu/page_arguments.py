"""What the kernels that read and write pages are told about them: numbers for types, widths, strides.

Not here: where arrays lie in a page (`kernels.layouts`) and how numbers are rounded (`reference.kv_codes`).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import capability, configs, power_of_two
from quantkit.kernels.gpu.choices import Decode, Prefill
from quantkit.kernels.gpu.split_kv import chunk, empty_partials, splits_of_cache
from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.kernels.types import AttentionOptions, States
from quantkit.numerics.dtype import FP8, INT4, INT8, DType

# As the kernels number them: a scale of the tensor or head is fixed, others are stored.
_KINDS: dict[DType | None, int] = {None: 0, FP8: 1, INT8: 2, INT4: 3}
_GRANULARITIES = {"tensor": 0, "head": 0, "token": 1, "channel": 2}

FP8_CAPABILITY = 90
"""From which on e4m3 is converted by the chip. Ada can too, but triton 3.6 asks it for an instruction of Hopper's."""

_BY_HAND = 256.0  # what e4m3 dequantized by hand is too small by


def residual_strides(views: KVViews) -> tuple[int, ...]:
    """Of the residual windows by row, head and slot."""
    return (0, 0, 0) if views.key_residual is None else views.key_residual.stride()[:3]


def page_constants(views: KVViews) -> dict[str, int]:
    """What kernels that read or write pages are compiled for."""
    constants = {"PAGE": views.layout.page_size, "RESIDUAL": max(1, views.layout.residual_tokens)}
    for side, array in (("K", views.key), ("V", views.value)):
        # Elements of a stored row: half the channels where two share a byte.
        width = views.layout.head_dim // 2 if array.scheme.dtype is INT4 else views.layout.head_dim
        constants[f"{side}_KIND"] = _KINDS[array.scheme.dtype]
        constants[f"{side}_GRANULARITY"] = 0 if array.scheme.dtype is None else _GRANULARITIES[array.scheme.granularity]
        constants[f"{side}_WIDTH"] = width
        constants[f"{side}_BLOCK"] = max(16, power_of_two(width))  # what tensor cores take
    return constants


def page_tensors(views: KVViews) -> tuple[Tensor | None, ...]:
    """Codes, scales and zeros of keys, then of values."""
    return tuple(one for array in (views.key, views.value) for one in (array.codes, array.scale, array.zero))


def fixed(array: PagedArray) -> Tensor:
    """(H,) float32, what numbers made of the codes of each head are multiplied with; ones where there is nothing."""
    return _ones(array.codes.shape[1], array.codes.device) if array.fixed is None else array.fixed


@functools.cache
def _ones(heads: int, device: torch.device) -> Tensor:
    """One for all, so that a recorded graph finds it again."""
    return torch.ones(heads, dtype=torch.float32, device=device)


def strides(views: KVViews) -> tuple[tuple[int, ...], ...]:
    """Of codes by page, head and token, and of scales by page and head: of keys, then of values."""
    return tuple(
        of
        for array in (views.key, views.value)
        for of in (array.codes.stride()[:3], (0, 0) if array.scale is None else array.scale.stride()[:2])
    )


def attend(
    kernel: Any, choice: Decode | Prefill, rows: tuple[int, int], programs: int, states: States, views: KVViews,
    batch: ForwardBatch, options: AttentionOptions, out: Tensor,
) -> None:  # fmt: skip
    """Launch a kernel of attention; that of single tokens and that of several take the same arguments.

    Args:
        kernel: which.
        choice: its tiles.
        rows: of a program, and how many of them have partials.
        programs: for a sequence and a key head, splits aside.
        states, views, batch, options, out: see `paged_decode.attend_tokens`.
    """
    layout, query, count = views.layout, states[0], len(batch.query_lengths)
    # By what the table has room for, not by lengths: those of a recorded graph are not known here.
    tiles, tokens = programs * layout.num_heads * count, batch.page_table.shape[1] * layout.page_size
    splits = splits_of_cache(tiles, tokens, configs.decode(views, count, query.shape[1], query.device), query.device)
    constants = _constants(states, views, options)
    fp8_unit = 1.0 if constants["NATIVE_FP8"] else _BY_HAND
    units = (fp8_unit if array.scheme.dtype is FP8 else 1.0 for array in (views.key, views.value))
    kernel[programs * splits, layout.num_heads, count](
        *states, views.key_residual, batch.residual_rows, batch.page_table, batch.query_starts, batch.positions, out,
        *empty_partials(tiles, splits, rows[1], layout.head_dim, query.device), *page_tensors(views),
        *(one.stride()[:2] for one in states), residual_strides(views), out.stride()[:2], batch.page_table.stride(0),
        *strides(views), float(options.scale), fixed(views.key), fixed(views.value), *units,
        float(options.softcap or 1.0), int(options.window or 0), splits,
        **constants, ROWS=rows[0], TILE=choice.tile, IS_SPLIT=splits > 1,
        CHUNK=chunk(power_of_two(rows[1]), constants["BLOCK"]), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip


def _constants(states: States, views: KVViews, options: AttentionOptions) -> dict[str, Any]:
    """What a kernel of attention is compiled for, its tiles aside."""
    layout, query = views.layout, states[0]
    group = query.shape[1] // layout.num_heads
    return {
        **page_constants(views),
        "NATIVE_FP8": capability(query.device) >= FP8_CAPABILITY,
        "HAS_RESIDUAL": views.key_residual is not None,
        "HAS_WINDOW": options.window is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "GROUP": group,
        "LANES": power_of_two(group),
        "WIDTH": layout.head_dim,
        "BLOCK": power_of_two(layout.head_dim),
    }
