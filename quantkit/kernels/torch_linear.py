"""Linears out of what torch has: the reference on any device, and its own low-bit kernels on CPU and CUDA.

Not here: the kernels compiled from C, which are faster on the CPUs they run on (`_native_linear`).
Shapes: T tokens, N outputs, K inputs, G scales per row, g = K / G.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.numerics.inputs import fake_quantize_inputs
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

# Group sizes that torch's INT4 kernels have.
_INT4_GROUPS = (32, 64, 128, 256)
# torch._int_mm on CUDA takes more than 16 rows and multiples of 8.
_INT_MM_ROWS = 32


class DenseLinear:
    """Reference: the decoded weight and torch's GEMM, on any device, in any dtype.

    Args:
        weight: (N, K) in the dtype of the computation; kept, not copied.
        bias: (N,) or None.
        activation: what the input is rounded to first.
        description: for tables.
    """

    def __init__(
        self, weight: Tensor, *, bias: Tensor | None, activation: ActivationScheme | None, description: str
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.stored_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.description = description
        self.weight = weight
        self.bias = bias
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        inputs = x if self.activation is None else fake_quantize_inputs(x, self.activation)
        return functional.linear(inputs.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


def can_int4(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has an INT4 kernel for this weight; its fp32 and fp16 forms on the CPU are slow loops."""
    rows, width = weight.shape
    group = width // weight.scale.shape[1]
    kind = weight.scheme.dtype
    fits = kind.kind == "int" and kind.bits <= 4 and group in _INT4_GROUPS and dtype == torch.bfloat16
    if device.type == "cuda":
        return fits and rows % 8 == 0 and width % 128 == 0
    return fits and device.type == "cpu" and rows % 64 == 0 and width % 32 == 0


class Int4Linear:
    """INT4 weights, bf16 inputs, by torch's `_weight_int4pack_mm`: value = (code - 8) * scale + zero.

    Scales and zeros are rounded to bf16, as that kernel wants them.
    """

    def __init__(self, weight: QuantizedTensor, *, bias: Tensor | None, device: torch.device) -> None:
        self.out_features, self.in_features = weight.shape
        self._group = self.in_features // weight.scale.shape[1]
        scale = weight.scale.float()
        zero = torch.zeros_like(scale) if weight.zero_point is None else -weight.zero_point.float() * scale
        # (G, N, 2)
        self._scales = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous().to(device, torch.bfloat16)
        codes = (weight.codes + 8).to(device)
        if device.type == "cuda":
            packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            self._packed = torch.ops.aten._convert_weight_to_int4pack(packed, 8)
            self._multiply = torch.ops.aten._weight_int4pack_mm
        else:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
            self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        self._bias = None if bias is None else bias.to(device, torch.bfloat16)
        self.stored_bytes = self._packed.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)
        self.description = f"{weight.scheme.describe()} (torch)"

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        inputs = x.to(torch.bfloat16).contiguous()
        out = self._multiply(inputs, self._packed, self._group, self._scales)
        result: Tensor = out if self._bias is None else out + self._bias
        return result.to(x.dtype)


def can_int8(weight: QuantizedTensor, activation: ActivationScheme | None, device: torch.device) -> bool:
    """Whether both sides are INT8 with one symmetric scale per output, which torch multiplies as integers."""
    rows, width = weight.shape
    fits = (
        activation is not None
        and activation.dtype.name == "int8"
        and weight.scheme.dtype.name == "int8"
        and weight.zero_point is None
        and weight.scale.shape[1] == 1
    )
    if device.type == "cuda":
        return fits and rows % 8 == 0 and width % 8 == 0
    return fits and device.type == "cpu" and hasattr(torch.ops.onednn, "qlinear_pointwise")


def quantize_tokens(x: Tensor, scheme: ActivationScheme) -> tuple[Tensor, Tensor]:
    """Codes and scales of `fake_quantize_inputs`, a scale per token.

    Args:
        x: (T, K) float; not modified.
        scheme: number type.
    Returns:
        codes: (T, K) float32; a row that holds a NaN or an infinity has codes 0.
        scale: (T, 1) float32; NaN for such a row, so that its outputs are NaN.
    """
    kind = scheme.dtype
    single = x.float()
    scale = single.abs().amax(dim=-1, keepdim=True) / kind.half_range
    finite = scale.isfinite()
    scale = torch.where(finite & (scale == 0), torch.finfo(torch.float32).eps, scale)
    codes = torch.where(finite, single / scale, 0.0).clamp_(kind.minimum, kind.maximum)
    codes = codes.round_() if kind.kind == "int" else codes.to(kind.storage).float()
    return codes, torch.where(finite, scale, torch.nan)


class Int8Linear:
    """INT8 weights and INT8 inputs, multiplied as integers by torch: oneDNN on the CPU, cuBLAS on CUDA."""

    def __init__(
        self, weight: QuantizedTensor, *, bias: Tensor | None, activation: ActivationScheme, device: torch.device
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._activation = activation
        self._bias = None if bias is None else bias.float().to(device)
        self._scale = weight.scale.float().reshape(-1).to(device)
        self._on_cpu = device.type == "cpu"
        codes = weight.codes.to(device)
        self._weight = torch.ops.onednn.qlinear_prepack(codes, None) if self._on_cpu else codes.t()
        self._zero = torch.zeros(self.out_features, dtype=torch.int32)
        self.stored_bytes = weight.codes.nbytes + self._scale.nbytes + (0 if bias is None else bias.nbytes)
        self.description = f"{weight.scheme.describe()}, activations {activation.describe()} (torch)"

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        codes, scale = quantize_tokens(x, self._activation)
        out = self._multiply_cpu(codes) if self._on_cpu else self._multiply_cuda(codes)
        out = out.mul_(scale)
        return (out if self._bias is None else out.add_(self._bias)).to(x.dtype)

    def _multiply_cpu(self, codes: Tensor) -> Tensor:
        unsigned = codes.add_(128).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, 128, self._weight, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out

    def _multiply_cuda(self, codes: Tensor) -> Tensor:
        rows = len(codes)
        padding = max(_INT_MM_ROWS, -(-rows // 8) * 8) - rows
        padded = functional.pad(codes.to(torch.int8), (0, 0, 0, padding))
        return torch._int_mm(padded, self._weight)[:rows].float() * self._scale


def can_fp8(
    weight: QuantizedTensor, activation: ActivationScheme | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the device multiplies FP8 by FP8 with one scale per row on each side (compute capability 8.9 on)."""
    rows, width = weight.shape
    return (
        device.type == "cuda"
        and activation is not None
        and activation.dtype.name == weight.scheme.dtype.name == "fp8"
        and weight.scale.shape[1] == 1
        and dtype == torch.bfloat16
        and rows % 16 == 0
        and width % 16 == 0
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


class FP8Linear:
    """FP8 weights and FP8 inputs, multiplied by cuBLAS with one scale per token and one per output."""

    def __init__(
        self, weight: QuantizedTensor, *, bias: Tensor | None, activation: ActivationScheme, device: torch.device
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._activation = activation
        self._bias = None if bias is None else bias.to(device, torch.bfloat16)
        self._weight = weight.codes.to(device).t()  # (K, N), column-major as cuBLAS wants it
        self._scale = weight.scale.float().reshape(1, -1).to(device)  # (1, N)
        self.stored_bytes = weight.codes.nbytes + self._scale.nbytes + (0 if bias is None else bias.nbytes)
        self.description = f"{weight.scheme.describe()}, activations {activation.describe()} (torch)"

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        codes, scale = quantize_tokens(x, self._activation)
        out = torch._scaled_mm(
            codes.to(torch.float8_e4m3fn),
            self._weight,
            scale_a=scale,
            scale_b=self._scale,
            bias=self._bias,
            out_dtype=torch.bfloat16,
        )
        return out.to(x.dtype)
