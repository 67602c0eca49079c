# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Linears whose inputs are rounded to 8 bits, one scale per token, in one launch; products are torch's or `w4a16`'s.

Up to 16 rows the INT8 codes go through the packed product, which reads the weight at the speed of memory; above that to
`torch._int_mm`, whose integer sums a further launch scales. FP8 goes to `torch._scaled_mm`.
Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quantkit.kernels._torch_linear import FP8Linear
from quantkit.kernels.triton import layout, power_of_two, w4a16
from quantkit.kernels.triton.kv_store import round_even, to_e4m3
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

_PACKED_ROWS = 16
_WIDEST = 65536


@triton.jit
def _round_kernel(x, codes, scale, width, IS_FP8: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """One token; see `_torch_linear.quantize_tokens`. Read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        columns = step * BLOCK + lanes
        value = tl.abs(tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32))
        broken |= tl.where(value < float("inf"), 0, 1)
        largest = tl.maximum(largest, value)
    finite = tl.max(broken, 0) == 0
    HALF_RANGE: tl.constexpr = 448.0 if IS_FP8 else 127.5
    step_size = tl.div_rn(tl.max(largest, 0), HALF_RANGE)
    step_size = tl.where(step_size == 0.0, 1.1920928955078125e-07, step_size)
    tl.store(scale + row, tl.where(finite, step_size, float("nan")))
    for step in range(STEPS):
        columns = step * BLOCK + lanes
        kept = columns < width
        value = tl.load(x + row * width + columns, mask=kept, other=0.0).to(tl.float32)
        value = tl.where(finite, tl.div_rn(value, tl.where(finite, step_size, 1.0)), 0.0)
        if IS_FP8:
            tl.store(codes + row * width + columns, to_e4m3(value), mask=kept)
        else:
            rounded = tl.minimum(tl.maximum(round_even(value), -128.0), 127.0)
            tl.store(codes + row * width + columns, rounded.to(tl.int8), mask=kept)


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


def quantize_rows(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`_torch_linear.quantize_tokens` in one launch.

    Args:
        x: (T, K) contiguous, T at least 1.
        name: int8 or fp8.
    Returns:
        codes: (T, K) int8, or uint8 that hold e4m3.
        scale: (T, 1) float32.
    """
    count, width = x.shape
    codes = torch.empty(count, width, dtype=torch.uint8 if name == "fp8" else torch.int8, device=x.device)
    scale = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    block = min(2048, power_of_two(width))
    _round_kernel[(count,)](
        x, codes, scale, width, IS_FP8=name == "fp8", BLOCK=block, STEPS=-(-width // block), num_warps=8
    )
    return codes, scale


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


class Int8Linear:
    """INT8 weights with one scale per output, INT8 inputs; sums are exact."""

    def __init__(
        self,
        weight: QuantizedTensor,
        *,
        bias: Tensor | None,
        activation: ActivationScheme,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        codes = weight.codes.to(device).contiguous()
        self._packed = layout.natural(dataclasses.replace(weight, codes=codes, scale=weight.scale.float().to(device)))
        self._columns = codes.t()
        self._bias = None if bias is None else bias.float().to(device)
        self._dtype = dtype
        self.stored_bytes = self._packed.num_bytes + (0 if self._bias is None else self._bias.nbytes)
        self.description = f"{weight.scheme.describe()}, activations {activation.describe()} (Triton)"

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        count = len(x)
        if count == 0:
            return x.new_empty(0, self.out_features)
        codes, scale = quantize_rows(x.contiguous(), "int8")
        if count <= _PACKED_ROWS:
            return w4a16.multiply(codes, self._packed, self._bias, scale.view(-1), x.dtype)
        padding = max(32, -(-count // 8) * 8) - count
        padded = codes if padding == 0 else functional.pad(codes, (0, 0, 0, padding))
        sums = torch._int_mm(padded, self._columns)[:count]
        return scale_sums(sums, scale, self._packed.scale, self._bias, x.dtype)


class RoundedFP8Linear(FP8Linear):
    """`_torch_linear.FP8Linear` with its inputs rounded in one launch."""

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        codes, scale = quantize_rows(x.contiguous(), "fp8")
        out = torch._scaled_mm(
            codes.view(torch.float8_e4m3fn),
            self._weight,
            scale_a=scale,
            scale_b=self._scale,
            bias=self._bias,
            out_dtype=torch.bfloat16,
        )
        return out.to(x.dtype)


def can_int8(weight: QuantizedTensor, activation: ActivationScheme | None) -> bool:
    """Whether `Int8Linear` multiplies this weight with inputs rounded like this."""
    rows, width = weight.shape
    return (
        activation is not None
        and activation.dtype.name == weight.scheme.dtype.name == "int8"
        and activation.group_size is None
        and weight.zero_point is None
        and weight.scale.shape[1] == 1
        and rows % 8 == 0
        and width % 8 == 0
        and width <= _WIDEST
    )
