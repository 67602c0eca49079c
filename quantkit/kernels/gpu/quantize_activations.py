# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, RET505  only one branch on a constant is compiled
"""Quantization of input rows to 8 bits in one launch, and conversion of integer sums to outputs.

Results match `reference.ops.quantize_tokens` and `numerics.activation_quant` bit for bit. A row with a NaN or an
infinity gets a scale of NaN, which makes its outputs NaN.
Shapes: T tokens, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.floats import load_inputs, round_even, row_factor, to_e4m3
from quantkit.kernels.gpu.gates import GATES, load_gated
from quantkit.kernels.torch_linear import int_mm_rows
from quantkit.kernels.types import ActivationQuantization, QuantizedActivations

PACKED_ROWS = 16
"""Maximum number of rows that the packed kernel multiplies with quantized inputs. With more rows, `torch._int_mm` may
multiply instead.
"""


@triton.jit
def scale_of_row(largest, is_finite, step, IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr):
    """Return the scale of a row with this largest magnitude, or `step` if the scale is fixed."""
    # Half the range of the codes; integers reach from -128 to 127.
    HALF_RANGE: tl.constexpr = 448.0 if IS_FP8 else 127.5
    scale = step
    if not IS_FIXED:
        scale = tl.div_rn(largest, HALF_RANGE)
        # For a row of zeros, 0 / 0 would be NaN.
        scale = tl.where(scale == 0.0, 1.1920928955078125e-07, scale)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def is_broken(value, IS_FIXED: tl.constexpr):
    """Return 1 for values that cannot be quantized: NaN, and infinity unless a fixed scale clamps it."""
    if IS_FIXED:
        return tl.where(value == value, 0, 1)
    else:
        return tl.where(tl.abs(value) < float("inf"), 0, 1)


@triton.jit
def row_codes(value, step, IS_FP8: tl.constexpr):
    """Divide numbers by their scale and round to codes; the code is 0 if the scale is NaN."""
    # False only for NaN, which is the scale of a row that cannot be quantized.
    is_finite = step == step
    scaled = tl.where(is_finite, tl.div_rn(value, tl.where(is_finite, step, 1.0)), 0.0)
    if IS_FP8:
        return to_e4m3(scaled)
    else:
        return tl.minimum(tl.maximum(round_even(scaled), -128.0), 127.0).to(tl.int8)


@triton.jit
def _load_row(x, row, columns, width, GATE: tl.constexpr):
    """Load a row as float32; with gates, return the gated values, rounded to the dtype of x."""
    if GATE < 0:
        return tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return load_gated(x, row, columns, width, GATE).to(tl.float32)


@triton.jit
def _quantize_rows_kernel(
    x, codes, scale, step, width,
    GATE: tl.constexpr, IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantize one row. A row may not fit the registers, so it is read and computed twice, the second time from the L2
    cache.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for index in range(STEPS):
        value = _load_row(x, row, index * BLOCK + lanes, width, GATE)
        broken |= is_broken(value, IS_FIXED)
        largest = tl.maximum(largest, tl.abs(value))
    row_scale = scale_of_row(tl.max(largest, 0), tl.max(broken, 0) == 0, step, IS_FP8, IS_FIXED)
    tl.store(scale + row, row_scale)
    for index in range(STEPS):
        columns = index * BLOCK + lanes
        value = _load_row(x, row, columns, width, GATE)
        tl.store(codes + row * width + columns, row_codes(value, row_scale, IS_FP8), mask=columns < width)


@triton.jit
def _dequantize_rows_kernel(codes, scale, out, width, BLOCK: tl.constexpr):
    """Dequantize BLOCK codes of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * width + columns
    value = load_inputs(codes + at, columns < width).to(tl.float32) * row_factor(codes)
    tl.store(out + at, (value * tl.load(scale + row)).to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _scale_kernel(sums, row_scale, scale, bias, out, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK outputs of one row from integer sums."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    value = tl.load(sums + row * width + columns, mask=kept, other=0).to(tl.float32)
    value *= tl.load(scale + columns, mask=kept, other=0.0).to(tl.float32)
    value *= tl.load(row_scale + row)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=kept)


def quantize_rows(
    x: Tensor, quantization: ActivationQuantization, activation: str | None = None
) -> QuantizedActivations:
    """Quantize rows in one launch.

    Args:
        x: (T, K) contiguous, T at least 1; with an activation (T, 2 K), gates first.
        quantization: number type and scale.
        activation: a key of `gates.GATES`: quantize activation(gate) * up, rounded to the dtype of x; None = quantize
            x.
    """
    count, width = x.shape[0], x.shape[1] if activation is None else x.shape[1] // 2
    rows = empty_rows(count, width, x, quantization)
    block = min(2048 if activation is None else 4096, power_of_two(width))
    _quantize_rows_kernel[(count,)](
        x, rows.codes, rows.scale, quantization.step or 0.0, width,
        GATE=-1 if activation is None else GATES[activation], IS_FP8=quantization.name == "fp8",
        IS_FIXED=quantization.step is not None, BLOCK=block, STEPS=-(-width // block),
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return rows


def empty_rows(count: int, width: int, x: Tensor, quantization: ActivationQuantization) -> QuantizedActivations:
    """Allocate codes for `count` rows of inputs like x, plus the extra rows that `torch._int_mm` needs."""
    rows = count if count <= PACKED_ROWS else int_mm_rows(count)
    dtype = torch.uint8 if quantization.name == "fp8" else torch.int8
    return QuantizedActivations(
        codes=torch.empty(rows, width, dtype=dtype, device=x.device),
        scale=torch.empty(count, 1, dtype=torch.float32, device=x.device),
        dtype=x.dtype,
    )


def dequantize_rows(rows: QuantizedActivations, dtype: torch.dtype) -> Tensor:
    """Return the values (T, K) of the codes."""
    count, width = len(rows), rows.codes.shape[1]
    out = torch.empty(count, width, dtype=dtype, device=rows.codes.device)
    block = min(1024, power_of_two(width))
    _dequantize_rows_kernel[count, -(-width // block)](rows.codes, rows.scale, out, width, BLOCK=block, num_warps=4)
    return out


def scale_sums(sums: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return sums * row_scale * scale + bias.

    Args:
        sums: (T, N) int32 contiguous.
        row_scale: (T, 1) float32.
        scale: (N,).
        bias: (N,) or None.
        dtype: dtype of the result.
    """
    count, width = sums.shape
    out = torch.empty(count, width, dtype=dtype, device=sums.device)
    block = 1024
    _scale_kernel[(count, -(-width // block))](
        sums, row_scale, scale, bias, out, width, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4
    )
    return out
