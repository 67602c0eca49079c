# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""The small operations of a block in one launch each: norms with the residual's addition, rotation, gates.

They compute in float32 and round where `reference` rounds. Shapes: T tokens, K features, H heads, D channels, R that
rotate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.triton import power_of_two

_WIDEST = 32768
_GATES = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1}


@triton.jit
def _norm_kernel(
    x, residual, weight, out, total, eps, offset, x_strides, out_strides, heads, width,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: of token p // heads, head p % heads."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    columns = tl.arange(0, BLOCK)
    kept = columns < width
    value = tl.load(x + token * x_strides[0] + head * x_strides[1] + columns, mask=kept, other=0.0).to(tl.float32)
    at = token * out_strides[0] + head * out_strides[1] + columns
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=kept, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + at, value, mask=kept)
        value = value.to(tl.float32)
    mean = tl.sum(value * value, 0) / width
    scaled = value * tl.rsqrt(mean + eps)
    factor = tl.load(weight + columns, mask=kept, other=0.0).to(tl.float32) + offset
    tl.store(out + at, (scaled * factor).to(out.dtype.element_ty), mask=kept)


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, query_strides, key_strides, query_heads, HALF: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One head of one token, queries first."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK)
    kept = pairs < HALF
    c = tl.load(cos + token * HALF + pairs, mask=kept, other=0.0)
    s = tl.load(sin + token * HALF + pairs, mask=kept, other=0.0)
    if head < query_heads:
        at = query + token * query_strides[0] + head * query_strides[1]
    else:
        at = key + token * key_strides[0] + (head - query_heads) * key_strides[1]
    if INTERLEAVED:
        one, other = at + 2 * pairs, at + 2 * pairs + 1
    else:
        one, other = at + pairs, at + HALF + pairs
    a = tl.load(one, mask=kept, other=0.0).to(tl.float32)
    b = tl.load(other, mask=kept, other=0.0).to(tl.float32)
    tl.store(one, (a * c - b * s).to(query.dtype.element_ty), mask=kept)
    tl.store(other, (b * c + a * s).to(query.dtype.element_ty), mask=kept)


@triton.jit
def _gate_kernel(x, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=kept, other=0.0).to(tl.float32)
    if KIND == 0:
        opened = gate * tl.sigmoid(gate)
    else:  # (1 + tanh z) / 2 = sigmoid(2 z)
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * width + columns, (opened * up).to(out.dtype.element_ty), mask=kept)


def _as_heads(x: Tensor) -> Tensor:
    """(T, H, K) of a tensor whose rows of K are contiguous; copied only where leading dimensions cannot be two."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """`ops.rms_norm`, or with a residual `ops.add_rms_norm`; None where this kernel does not apply.

    Returns:
        normed, and the sum (of no meaning without a residual).
    """
    width = x.shape[-1]
    if width > _WIDEST or x.stride(-1) != 1 or x.numel() == 0 or not weight.is_contiguous():
        return None
    if residual is not None and not (residual.is_contiguous() and residual.dtype == x.dtype):
        return None
    rows = _as_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = power_of_two(width)
    _norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows, residual, weight, out, total, float(eps), float(offset),
        rows.stride()[:2], (rows.shape[1] * width, width), rows.shape[1], width,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return out, total


def rotary_(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
    """`ops.rotary_`; False where this kernel does not apply."""
    fits = query.stride(-1) == key.stride(-1) == 1 and query.dtype == key.dtype and cos.is_contiguous()
    if not fits or not sin.is_contiguous() or cos.dtype != torch.float32:
        return False
    half = cos.shape[-1]
    if len(query):
        _rotate_kernel[(len(query), query.shape[1] + key.shape[1])](
            query, key, cos, sin, query.stride()[:2], key.stride()[:2], query.shape[1],
            HALF=half, BLOCK=power_of_two(half), INTERLEAVED=interleaved, num_warps=1,
        )  # fmt: skip
    return True


def gated(gate_up: Tensor, activation: str) -> Tensor | None:
    """`ops.gated`; None where this kernel does not apply."""
    if activation not in _GATES or not gate_up.is_contiguous() or gate_up.dim() != 2:
        return None
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(count, width)
    if out.numel():
        block = min(1024, power_of_two(width))
        _gate_kernel[(count, -(-width // block))](
            gate_up, out, width, KIND=_GATES[activation], BLOCK=block, num_warps=4
        )
    return out
