# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Logits of a model's head on a CUDA device, and the likeliest token of each row on the way.

A packed head's product is scaled, capped and widened where it is computed, and the partial argmax of each tile is noted
there (`w4a16`); of another head's the same is done in a launch of its own. A further, small one compares them.
Shapes: R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu.linear import PackedLinear
from quantkit.kernels.gpu.partial_argmax import argmax, as_logits, empty_partial_argmax, store_partial_argmax
from quantkit.kernels.types import Linear

MOST_ROWS = 256
"""With more, which only prompts are scored with, nobody asks for the likeliest token."""

_TILE = 2048


@triton.jit
def _logits_kernel(
    x, out, partials, num_rows, vocabulary, row_stride, scale, softcap, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of a row."""
    row = tl.program_id(1) + tl.arange(0, 1)
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (tokens < vocabulary)[None, :] & (row < num_rows)[:, None]
    value = tl.load(x + row.to(tl.int64)[:, None] * row_stride + tokens[None, :], mask=mask, other=0.0)
    value = as_logits(value.to(tl.float32), scale, softcap)
    tl.store(out + row.to(tl.int64)[:, None] * vocabulary + tokens[None, :], value, mask=mask)
    if partials is not None:
        store_partial_argmax(value, partials, row, tokens, mask, tl.program_id(0), num_rows, tl.num_programs(0))


def logits(head: Linear, x: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """`ops.head.logits`: its values and its likeliest tokens, None for more than MOST_ROWS rows."""
    if isinstance(head, PackedLinear) and len(x) <= MOST_ROWS:
        fused = head.logits(x, float(scale), float(softcap or 0.0))
        if fused is not None:
            return fused[0], argmax(fused[1])
    return _widen(head(x), float(scale), float(softcap or 0.0))


def _widen(product: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    rows, size = product.shape
    out = torch.empty(rows, size, dtype=torch.float32, device=product.device)
    tiles = -(-size // _TILE)
    partials = empty_partial_argmax(rows, tiles, product.device) if rows <= MOST_ROWS else None
    _logits_kernel[(tiles, rows)](
        product, out, partials, rows, size, product.stride(0), scale, softcap, TILE=_TILE, num_warps=4
    )
    return out, None if partials is None else argmax(partials)
