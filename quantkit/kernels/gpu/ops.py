# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Small operations of a block in one launch each: norms that also add the residual, and gated activations.

If all linears that read an output need 8-bit inputs, the same launch also quantizes this output. The kernels compute in
float32 and round where `reference.ops` rounds. A function returns None if no kernel supports the tensors.
Shapes: T tokens, K features, H heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.gates import GATES, load_gated
from quantkit.kernels.gpu.quantize_activations import empty_rows, is_broken, quantize_rows, row_codes, scale_of_row
from quantkit.kernels.types import ActivationQuantization, QuantizedActivations

_WIDEST = 32768
_CODES = {"int8": 1, "fp8": 2}


@triton.jit
def _norm_kernel(
    x, residual, weight, out, total, row_scale, step, eps, offset, x_strides, out_strides, heads, width,
    HAS_RESIDUAL: tl.constexpr, CODES: tl.constexpr, IS_FIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm one row: program p handles head p % heads of token p // heads. CODES says how the row is stored: 0 =
    unquantized, 1 = int8, 2 = fp8.
    """
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
    if CODES == 0:
        tl.store(out + at, normed, mask=kept)
    else:
        # Rounded to the dtype of x first, because a separate launch would have read rounded values.
        value = tl.where(kept, normed.to(tl.float32), 0.0)
        broken = tl.max(is_broken(value, IS_FIXED), 0)
        scale = scale_of_row(tl.max(tl.abs(value), 0), broken == 0, step, CODES == 2, IS_FIXED)
        tl.store(row_scale + row, scale)
        tl.store(out + at, row_codes(value, scale, CODES == 2), mask=kept)


@triton.jit
def _gate_kernel(x, out, width, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK gated outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * width + columns, load_gated(x, row, columns, width, GATE), mask=columns < width)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    residual: Tensor | None = None,
    quantization: ActivationQuantization | None = None,
) -> tuple[Tensor | QuantizedActivations, Tensor] | None:
    """See `ops.rms_norm`; outputs are quantized only if x is (T, K)."""
    if x.shape[-1] > _WIDEST or x.stride(-1) != 1 or x.numel() == 0 or not weight.is_contiguous():
        return None
    if residual is not None and not (residual.is_contiguous() and residual.dtype == x.dtype):
        return None
    width, rows = x.shape[-1], x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])  # (T, H, K)
    # Not `empty_like`, which would copy the strides of a slice; outputs are contiguous.
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed: Tensor | QuantizedActivations
    if quantization is None or x.dim() != 2:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out, scale, step, codes = normed, None, None, 0
    else:
        normed = empty_rows(len(x), width, x, quantization)
        out, scale, step, codes = normed.codes, normed.scale, quantization.step, _CODES[quantization.name]
    block = power_of_two(width)
    _norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows, residual, weight, out, None if residual is None else total, scale, step or 0.0, float(eps), float(offset),
        rows.stride()[:2], (rows.shape[1] * width, width), rows.shape[1], width,
        HAS_RESIDUAL=residual is not None, CODES=codes, IS_FIXED=step is not None, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return normed, total


def gated(
    gate_up: Tensor, activation: str, quantization: ActivationQuantization | None = None
) -> Tensor | QuantizedActivations | None:
    """See `ops.gated`."""
    if activation not in GATES or not gate_up.is_contiguous() or gate_up.dim() != 2:
        return None
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    if quantization is not None and gate_up.numel():
        return quantize_rows(gate_up, quantization, activation)
    out = gate_up.new_empty(count, width)
    if out.numel():
        block = min(1024, power_of_two(width))
        _gate_kernel[count, -(-width // block)](gate_up, out, width, GATE=GATES[activation], BLOCK=block, num_warps=4)
    return out
