"""What the kernels that read and write pages are told about them: numbers for types, widths, strides.

Not here: where arrays lie in a page (`kernels.layouts`) and how numbers are rounded (`reference.kv_codes`).
"""

import functools

import torch
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.numerics.dtype import FP8, INT4, INT8, DType

# As the kernels number them: a scale of the tensor or head is fixed, others are stored.
_KINDS: dict[DType | None, int] = {None: 0, FP8: 1, INT8: 2, INT4: 3}
_GRANULARITIES = {"tensor": 0, "head": 0, "token": 1, "channel": 2}


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
