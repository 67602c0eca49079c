"""Linears that use torch's low-bit kernels on CPU and CUDA, and checks of the shapes that cuBLAS multiplies in 8 bits.

Shapes: T tokens, N outputs, K inputs, G scales per row, g = K / G.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.reference.ops import quantize_tokens
from quantkit.kernels.types import Linear, LinearSource, nbytes
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

# torch._int_mm on CUDA needs more than 16 rows, and sizes that are multiples of 8.
_INT_MM_ROWS = 32


def fits_int_mm(weight: QuantizedTensor) -> bool:
    """Whether `torch._int_mm` on CUDA supports the shape (N, K) of a weight."""
    return weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0


def int_mm_rows(count: int) -> int:
    """Return the number of input rows that `torch._int_mm` needs for `count` rows; the extra rows may hold anything."""
    return max(_INT_MM_ROWS, -(-count // 8) * 8)


def is_int8_by_output(weight: QuantizedTensor, inputs: str) -> bool:
    """Whether weight and inputs are INT8 and scales can be applied after summation: one per output, no zero points."""
    is_int8 = inputs == weight.scheme.dtype.name == "int8"
    return is_int8 and weight.zero_point is None and weight.scale.shape[1] == 1


def fits_scaled_mm(source: LinearSource) -> bool:
    """Whether the device multiplies FP8 by FP8 with one scale per row on each side (compute capability >= 8.9)."""
    weight, activation = source.weight, source.activation
    return (
        source.device.type == "cuda"
        and activation is not None
        and activation.dtype.name == weight.scheme.dtype.name == "fp8"
        and weight.scale.shape[1] == 1
        and source.dtype == torch.bfloat16
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 16 == 0
        and torch.cuda.get_device_capability(source.device) >= (8, 9)
    )


def scaled_mm(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply FP8 inputs by an FP8 weight.

    Args:
        codes: (T, K) e4m3.
        row_scale: (T, 1) float32.
        weight: (N, K) e4m3, contiguous; cuBLAS reads it as a column-major (K, N).
        scale: (N,) or (N, 1) float32.
        bias: (N,) bfloat16 or None.
    Returns:
        (T, N) bfloat16.
    """
    return torch._scaled_mm(
        codes, weight.t(), scale_a=row_scale, scale_b=scale.view(1, -1), bias=bias, out_dtype=torch.bfloat16
    )


# Group sizes that torch's INT4 kernels support.
_INT4_GROUPS = (32, 64, 128, 256)


def linear_of(source: LinearSource) -> Linear | None:
    """Build the layer on a torch kernel; None if torch has no kernel for it.

    Args:
        source: the weight, with groups in input order, and settings. Activations, if quantized, have one scale per
            token.
    """
    if source.activation is None:
        return _Int4Linear(source) if _can_int4(source) else None
    can = _can_int8(source, source.activation) or fits_scaled_mm(source)
    return _QuantizedInputsLinear(source, source.activation) if can else None


def _can_int4(source: LinearSource) -> bool:
    """Whether torch has a fast INT4 kernel for this weight; its fp32 and fp16 versions on the CPU are slow loops."""
    rows, width = source.weight.shape
    group, kind = width // source.weight.scale.shape[1], source.weight.scheme.dtype
    fits = kind.kind == "int" and kind.bits <= 4 and group in _INT4_GROUPS and source.dtype == torch.bfloat16
    if source.device.type == "cuda":
        return fits and rows % 8 == 0 and width % 128 == 0
    return fits and source.device.type == "cpu" and rows % 64 == 0 and width % 32 == 0


class _Int4Linear(Linear):
    """A linear with INT4 weights and bf16 inputs on torch's `_weight_int4pack_mm`: value = (code - 8) * scale + zero.

    Scales and zeros are rounded to bf16, as the kernel requires.
    """

    def __init__(self, source: LinearSource) -> None:
        weight, device = source.weight, source.device
        self._group = weight.shape[1] // weight.scale.shape[1]
        scale = weight.scale.float()
        zero = torch.zeros_like(scale) if weight.zero_point is None else -weight.zero_point.float() * scale
        # (G, N, 2)
        self._scales = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous().to(device, torch.bfloat16)
        # Unsigned before packing, because the kernel subtracts 8 from each code.
        codes = (weight.codes + 8).to(device)
        if device.type == "cuda":
            packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            self._packed = torch.ops.aten._convert_weight_to_int4pack(packed, 8)
            self._multiply = torch.ops.aten._weight_int4pack_mm
        else:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
            self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        self._bias = source.bias_in(torch.bfloat16)
        num_bytes = nbytes(self._packed, self._scales, source.bias)
        super().__init__(weight.shape, num_bytes, source.describe("torch"))

    def __call__(self, x: Tensor) -> Tensor:
        inputs = x.to(torch.bfloat16).contiguous()
        out = self._multiply(inputs, self._packed, self._group, self._scales)
        result: Tensor = out if self._bias is None else out + self._bias
        return result.to(x.dtype)


def _can_int8(source: LinearSource, activation: ActivationScheme) -> bool:
    """Whether torch can multiply weight and inputs as integers on this device."""
    if not is_int8_by_output(source.weight, activation.dtype.name):
        return False
    if source.device.type == "cuda":
        return fits_int_mm(source.weight)
    return source.device.type == "cpu" and hasattr(torch.ops.onednn, "qlinear_pointwise")


class _QuantizedInputsLinear(Linear):
    """A linear with one scale per output of its weight and one scale per input token; both are INT8, or both are FP8.

    On CUDA, cuBLAS multiplies. On the CPU, oneDNN multiplies INT8; if oneDNN is not exact, torch multiplies in float32.
    """

    def __init__(self, source: LinearSource, activation: ActivationScheme) -> None:
        weight, is_int8 = source.weight, activation.dtype.kind == "int"
        self._activation = activation
        self._bias = source.bias_in(torch.float32 if is_int8 else torch.bfloat16)
        self._scale = weight.scale.float().reshape(-1).to(source.device)
        self._codes = weight.codes.to(source.device)
        self._multiply = self._int8_on_cuda
        if source.device.type == "cpu":
            self._multiply = self._int8_on_cpu if _onednn_is_exact() else self._int8_in_float32
            if _onednn_is_exact():
                self._codes = torch.ops.onednn.qlinear_prepack(self._codes, None)
        self._is_int8 = is_int8
        super().__init__(weight.shape, nbytes(weight.codes, self._scale, source.bias), source.describe("torch"))

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        codes, scale = quantize_tokens(x, self._activation)
        if not self._is_int8:
            codes = codes.to(torch.float8_e4m3fn)
            return scaled_mm(codes, scale, self._codes, self._scale, self._bias).to(x.dtype)
        out = self._multiply(codes).mul_(scale)
        return (out if self._bias is None else out.add_(self._bias)).to(x.dtype)

    def _int8_on_cpu(self, codes: Tensor) -> Tensor:
        return _onednn_product(codes, self._codes, self._scale)

    def _int8_in_float32(self, codes: Tensor) -> Tensor:
        return functional.linear(codes, self._codes.float()) * self._scale

    def _int8_on_cuda(self, codes: Tensor) -> Tensor:
        rows = len(codes)
        padded = functional.pad(codes.to(torch.int8), (0, 0, 0, int_mm_rows(rows) - rows))
        return torch._int_mm(padded, self._codes.t())[:rows].float() * self._scale


def _onednn_product(codes: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Multiply INT8 codes (T, K), stored as float32 and modified, by a prepacked weight; return (T, N) float32."""
    # oneDNN wants inputs unsigned, with a zero point.
    unsigned, zero = codes.add_(128).to(torch.uint8), torch.zeros_like(scale, dtype=torch.int32)
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@cache
def _onednn_is_exact() -> bool:
    """Whether oneDNN's sums are exact; on CPUs without VNNI it adds pairs of products in 16 bits, which saturate."""
    largest = torch.full((1, 64), 127, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(largest, None)
    sums = _onednn_product(largest.float(), packed, torch.ones(1))
    return bool(sums.item() == 64 * 127 * 127)
