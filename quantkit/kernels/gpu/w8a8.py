# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, RET505  of branches on constants one is compiled
"""Rows of inputs rounded to 8 bits in one launch, and what integer sums become.

Bit for bit as `_torch_linear.quantize_tokens` and `numerics.inputs` have it. A row that holds what cannot be rounded
has a scale of NaN, which makes its outputs NaN.
Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.floats import half_number
from quantkit.kernels.gpu.kv_store import round_even, to_e4m3
from quantkit.kernels.quantized_activations import RoundedRows, Rounding

# torch._int_mm on CUDA takes more than 16 rows and multiples of 8.
_PACKED_ROWS, _LEAST_ROWS = 16, 32


@triton.jit
def row_step(largest, is_finite, step, IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr):
    """Scale of a row whose largest magnitude is given; `step` where it is fixed."""
    HALF_RANGE: tl.constexpr = 448.0 if IS_FP8 else 127.5
    if IS_FIXED:
        found = step
    else:
        found = tl.div_rn(largest, HALF_RANGE)
        found = tl.where(found == 0.0, 1.1920928955078125e-07, found)
    return tl.where(is_finite, found, float("nan"))


@triton.jit
def is_broken(value, IS_FIXED: tl.constexpr):
    """1 for what cannot be rounded: NaN, and infinity unless the scale is fixed, where it is cut off."""
    if IS_FIXED:
        return tl.where(value == value, 0, 1)
    else:
        return tl.where(tl.abs(value) < float("inf"), 0, 1)


@triton.jit
def row_codes(value, step, IS_FP8: tl.constexpr):
    """Codes of numbers by their scale; 0 where that is NaN."""
    is_finite = step == step
    scaled = tl.where(is_finite, tl.div_rn(value, tl.where(is_finite, step, 1.0)), 0.0)
    if IS_FP8:
        return to_e4m3(scaled)
    else:
        return tl.minimum(tl.maximum(round_even(scaled), -128.0), 127.0).to(tl.int8)


@triton.jit
def _round_kernel(
    x, codes, scale, step, width,
    IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One row. Read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for index in range(STEPS):
        columns = index * BLOCK + lanes
        value = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        broken |= is_broken(value, IS_FIXED)
        largest = tl.maximum(largest, tl.abs(value))
    found = row_step(tl.max(largest, 0), tl.max(broken, 0) == 0, step, IS_FP8, IS_FIXED)
    tl.store(scale + row, found)
    for index in range(STEPS):
        columns = index * BLOCK + lanes
        value = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(codes + row * width + columns, row_codes(value, found, IS_FP8), mask=columns < width)


@triton.jit
def _values_kernel(codes, scale, out, width, BLOCK: tl.constexpr):
    """BLOCK codes of one row as the numbers they mean."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * width + columns
    code = tl.load(codes + at, mask=columns < width, other=0)
    if codes.dtype.element_ty == tl.uint8:
        bits = code.to(tl.int32)
        value = half_number(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)) * 256.0
    else:
        value = code.to(tl.float32)
    tl.store(out + at, (value * tl.load(scale + row)).to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _scale_kernel(sums, row_scale, scale, bias, out, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    value = tl.load(sums + row * width + columns, mask=kept, other=0).to(tl.float32)
    value *= tl.load(scale + columns, mask=kept, other=0.0).to(tl.float32)
    value *= tl.load(row_scale + row)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=kept)


def round_rows(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Round, in one launch.

    Args:
        x: (T, K) contiguous, T at least 1.
        rounding: how.
    """
    count, width = x.shape
    codes = empty_codes(count, width, rounding, x.device)
    scale = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    block = min(2048, power_of_two(width))
    _round_kernel[(count,)](
        x, codes, scale, 0.0 if rounding.step is None else rounding.step, width,
        IS_FP8=rounding.name == "fp8", IS_FIXED=rounding.step is not None,
        BLOCK=block, STEPS=-(-width // block), num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return RoundedRows(codes=codes, scale=scale, dtype=x.dtype)


def empty_codes(count: int, width: int, rounding: Rounding, device: torch.device) -> Tensor:
    """Room for the codes of so many rows, and for those that `torch._int_mm` wants besides, which nothing fills."""
    rows = count if count <= _PACKED_ROWS else max(_LEAST_ROWS, -(-count // 8) * 8)
    return torch.empty(rows, width, dtype=torch.uint8 if rounding.name == "fp8" else torch.int8, device=device)


def values_of(rows: RoundedRows, dtype: torch.dtype) -> Tensor:
    """(T, K), what the codes mean."""
    count, width = len(rows), rows.codes.shape[1]
    out = torch.empty(count, width, dtype=dtype, device=rows.codes.device)
    block = min(1024, power_of_two(width))
    _values_kernel[(count, -(-width // block))](rows.codes, rows.scale, out, width, BLOCK=block, num_warps=4)
    return out


def scale_sums(sums: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums * row_scale * scale + bias.

    Args:
        sums: (T, N) int32 contiguous.
        row_scale: (T, 1) float32.
        scale: (N,).
        bias: (N,) or None.
        dtype: of the result.
    """
    count, width = sums.shape
    out = torch.empty(count, width, dtype=dtype, device=sums.device)
    block = 1024
    _scale_kernel[(count, -(-width // block))](
        sums, row_scale, scale, bias, out, width, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4
    )
    return out
