# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""The largest of a row, tile by tile: who computes a tile of logits notes its maximum, and one small launch compares.

Floats are compared as integers of the same order: NaN is the largest, as in `argmax`, and zeros are equal; the first of
equals wins. Device functions for `head`, `w4a16` and `sampling`.
Shapes: R rows, V vocabulary, N tiles of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two

LEAST: tl.constexpr = tl.constexpr(-(2**31))
"""Below the order of all floats."""

_NOBODY: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_MOST_AT_ONCE = 2048


@triton.jit
def ordered(x):
    """Integers in the order of the floats; NaN above all."""
    # The bits of the zeros differ, and `argmax` takes the first of them.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def number(order):
    """The float of an integer from `ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first(order, tokens):
    """The largest and the first token that has it."""
    best = tl.max(order, 0)
    return best, tl.min(tl.where(order == best, tokens, _NOBODY), 0)


@triton.jit
def as_logits(x, scale, softcap):
    """Logits of what the head's product gives; a softcap of 0 is none."""
    x *= scale
    if softcap > 0:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh
    return x


@triton.jit
def store_partial_argmax(values, partials, rows, outputs, mask, tile, num_rows, num_tiles):
    """Note each row's maximum of a tile (ROWS, OUTPUTS) and whose it is, in (R, 2, N) int32."""
    order = tl.where(mask, ordered(values), LEAST)
    top = tl.max(order, 1)
    token = tl.min(tl.where(order == top[:, None], outputs[None, :], _NOBODY), 1)
    at = partials + rows.to(tl.int64) * 2 * num_tiles + tile
    tl.store(at, top, mask=rows < num_rows)
    tl.store(at + num_tiles, token, mask=rows < num_rows)


@triton.jit
def _argmax_kernel(partials, out, num_tiles, BLOCK: tl.constexpr):
    """The first token with the largest logit of a row."""
    row = tl.program_id(0).to(tl.int64)
    best = LEAST
    best_token = 0
    for start in range(0, num_tiles, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        at = partials + row * 2 * num_tiles + columns
        order = tl.load(at, mask=columns < num_tiles, other=LEAST)
        largest, token = first(order, tl.load(at + num_tiles, mask=columns < num_tiles, other=_NOBODY))
        best_token = tl.where(largest > best, token, best_token)  # tokens of later tiles are later
        best = tl.maximum(largest, best)
    tl.store(out + row, best_token)


def empty_partial_argmax(rows: int, tiles: int, device: torch.device) -> Tensor:
    """Memory for `store_partial_argmax`: (R, 2, N) int32."""
    return torch.empty(rows, 2, tiles, dtype=torch.int32, device=device)


def argmax(partials: Tensor) -> Tensor:
    """The first token with the largest logit of each row: (R, 2, N) to (R,) int64."""
    rows, _, tiles = partials.shape
    out = torch.empty(rows, dtype=torch.int64, device=partials.device)
    block = min(power_of_two(tiles), _MOST_AT_ONCE)
    _argmax_kernel[(rows,)](partials, out, tiles, BLOCK=block, num_warps=max(1, min(8, block // 256)))
    return out
