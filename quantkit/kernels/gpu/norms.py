# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""The small operations of a block in one launch each: norms with the residual's addition, rotation, gates.

Norms and gates also round their outputs to 8 bits in that launch, where only linears that want it read them.
They compute in float32 and round where `reference` rounds. Shapes: T tokens, K features, H heads, D channels, R that
rotate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.w8a8 import empty_codes, is_broken, row_codes, row_step
from quantkit.kernels.quantized_activations import RoundedRows, Rounding

_WIDEST = 32768
_ROUNDS = {"int8": 1, "fp8": 2}
_GATES = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1}


@triton.jit
def _norm_kernel(
    x, residual, weight, out, total, row_scale, step, eps, offset, x_strides, out_strides, heads, width,
    HAS_RESIDUAL: tl.constexpr, ROUNDS: tl.constexpr, IS_FIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: of token p // heads, head p % heads. ROUNDS: 0 = as it is, to int8 (1) or fp8 (2), as in `w8a8`."""
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
    normed = (scaled * factor).to(x.dtype.element_ty)
    if ROUNDS == 0:
        tl.store(out + at, normed, mask=kept)
    else:
        # Rounded to the dtype of x first: what a launch of its own would have read.
        value = tl.where(kept, normed.to(tl.float32), 0.0)
        broken = tl.max(is_broken(value, IS_FIXED), 0)
        found = row_step(tl.max(tl.abs(value), 0), broken == 0, step, ROUNDS == 2, IS_FIXED)
        tl.store(row_scale + row, found)
        tl.store(out + at, row_codes(value, found, ROUNDS == 2), mask=kept)


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
def _opened(x, row, columns, width, KIND: tl.constexpr):
    """activation(gate) * up in the dtype of x."""
    gate = tl.load(x + row * 2 * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=columns < width, other=0.0).to(tl.float32)
    if KIND == 0:
        opened = gate * tl.sigmoid(gate)
    else:  # (1 + tanh z) / 2 = sigmoid(2 z)
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (opened * up).to(x.dtype.element_ty)


@triton.jit
def _gate_kernel(x, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * width + columns, _opened(x, row, columns, width, KIND), mask=columns < width)


@triton.jit
def _gate_round_kernel(
    x, codes, scale, step, width, KIND: tl.constexpr, IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One row, rounded to 8 bits. Computed twice, from the cache the second time: it does not fit the registers."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for index in range(STEPS):
        value = _opened(x, row, index * BLOCK + tl.arange(0, BLOCK), width, KIND).to(tl.float32)
        broken |= is_broken(value, IS_FIXED)
        largest = tl.maximum(largest, tl.abs(value))
    found = row_step(tl.max(largest, 0), tl.max(broken, 0) == 0, step, IS_FP8, IS_FIXED)
    tl.store(scale + row, found)
    for index in range(STEPS):
        columns = index * BLOCK + tl.arange(0, BLOCK)
        value = _opened(x, row, columns, width, KIND).to(tl.float32)
        tl.store(codes + row * width + columns, row_codes(value, found, IS_FP8), mask=columns < width)


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
    if not _fits(x, weight, residual):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, _launch_norm(x, weight, eps, offset, residual, out, None, None)


def rounded_rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None, rounding: Rounding
) -> tuple[RoundedRows, Tensor] | None:
    """The same for (T, K), rounded to 8 bits after it has been rounded to the dtype of x."""
    if x.dim() != 2 or not _fits(x, weight, residual):
        return None
    codes = empty_codes(len(x), x.shape[1], rounding, x.device)
    scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    total = _launch_norm(x, weight, eps, offset, residual, codes, scale, rounding)
    return RoundedRows(codes=codes, scale=scale, dtype=x.dtype), total


def _fits(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    if x.shape[-1] > _WIDEST or x.stride(-1) != 1 or x.numel() == 0 or not weight.is_contiguous():
        return False
    return residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)


def _launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    residual: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    rounding: Rounding | None,
) -> Tensor:
    """Fills `out` and `scale`; returns the sum, x without a residual."""
    width, rows = x.shape[-1], _as_heads(x)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    step = None if rounding is None else rounding.step
    _norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows, residual, weight, out, None if residual is None else total, scale, step or 0.0, float(eps), float(offset),
        rows.stride()[:2], (rows.shape[1] * width, width), rows.shape[1], width,
        HAS_RESIDUAL=residual is not None, ROUNDS=0 if rounding is None else _ROUNDS[rounding.name],
        IS_FIXED=step is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return total


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


def rounded_gated(gate_up: Tensor, activation: str, rounding: Rounding) -> RoundedRows | None:
    """The same, rounded to 8 bits after it has been rounded to the dtype of gate_up."""
    if activation not in _GATES or not gate_up.is_contiguous() or gate_up.dim() != 2 or not gate_up.numel():
        return None
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = empty_codes(count, width, rounding, gate_up.device)
    scale = torch.empty(count, 1, dtype=torch.float32, device=gate_up.device)
    block = min(4096, power_of_two(width))
    _gate_round_kernel[(count,)](
        gate_up, codes, scale, rounding.step or 0.0, width,
        KIND=_GATES[activation], IS_FP8=rounding.name == "fp8", IS_FIXED=rounding.step is not None,
        BLOCK=block, STEPS=-(-width // block), num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return RoundedRows(codes=codes, scale=scale, dtype=gate_up.dtype)
