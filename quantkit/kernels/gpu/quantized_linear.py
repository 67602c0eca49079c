"""Linears on Triton's kernels: the choice of product by types of weight and inputs, and by number of rows.

| weight, inputs        | up to 16 rows | more rows                                                       |
|-----------------------|---------------|-----------------------------------------------------------------|
| INT8 per output, INT8 | packed        | `torch._int_mm`, if it supports the shape                       |
| FP8 per output, FP8   | packed        | `torch._scaled_mm`, if it supports the chip and the shape       |
| all others            | packed        | packed up to 256 rows; above, dequantized to 16 bits for cuBLAS |

In the first two rows of the table, shapes and chips that torch does not support are handled as in the last row.

Unquantized inputs are quantized in one launch; a norm or gate may also pass inputs that are already quantized.
Shapes: T tokens, N outputs, K inputs.
"""

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.gpu import attempt, packing, w4a16
from quantkit.kernels.gpu.choices import TILE_LIMIT
from quantkit.kernels.gpu.gates import GATES
from quantkit.kernels.gpu.packing import PackedWeight
from quantkit.kernels.gpu.quantize_activations import PACKED_ROWS, dequantize_rows, quantize_rows, scale_sums
from quantkit.kernels.torch_linear import fits_int_mm, fits_scaled_mm, int_mm_rows, is_int8_by_output, scaled_mm
from quantkit.kernels.types import (
    ActivationQuantization,
    Linear,
    LinearSource,
    QuantizedActivations,
    WrappedLinear,
    nbytes,
)
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

_WIDEST = 65536  # maximum number of inputs for which products of bytes can be summed in 32 bits
_QUANTIZED = ("int8", "fp8")


def quantization_of(weight: QuantizedTensor, activation: ActivationScheme) -> ActivationQuantization | None:
    """Return how inputs are quantized to int8 or fp8, ignoring groups; None for other types or missing fixed scales."""
    if activation.dtype.name not in _QUANTIZED:
        return None
    if activation.dynamic:
        return ActivationQuantization(name=activation.dtype.name)
    if weight.input_scale is None:
        return None
    # For compiling without running, tensors are on the meta device, without numbers; any step gives the same program.
    step = 1.0 if weight.input_scale.is_meta else weight.input_scale.float().item()
    return ActivationQuantization(name=activation.dtype.name, step=step)


class PackedLinear(Linear):
    """A linear with 16-bit inputs and a packed weight: integers of 2 to 8 bits, FP8 or FP4.

    Triton's kernel multiplies few rows with the packed weight. For many rows, it is not faster than cuBLAS, so the
    weight is dequantized into temporary memory and cuBLAS multiplies.
    """

    def __init__(self, source: LinearSource) -> None:
        self.packed = packing.pack(source.weight, source.device)
        self.bias = source.bias_in(source.dtype)
        self._dtype = source.dtype
        num_bytes = self.packed.num_bytes + nbytes(self.bias)
        super().__init__(source.weight.shape, num_bytes, f"{source.weight.scheme.describe()} (Triton)")

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        inputs = x.to(self._dtype).contiguous()
        if len(x) <= TILE_LIMIT:
            product = attempt("quantized_linear", x.device, w4a16.multiply, inputs, self.packed, self.bias)
            if product is not None:
                return product.to(x.dtype)
        return functional.linear(inputs, w4a16.dequantize_weight(self.packed, self._dtype), self.bias).to(x.dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """See `Linear`."""
        # With more rows, cuBLAS multiplies. It has no gates, so they need a separate launch.
        if activation not in GATES or not 0 < len(x) <= TILE_LIMIT:
            return None
        inputs = x.to(self._dtype).contiguous()
        opened = attempt("quantized_linear", x.device, w4a16.multiply, inputs, self.packed, self.bias, activation)
        return None if opened is None else opened.to(x.dtype)


class _QuantizedInputsLinear(Linear):
    """A linear whose inputs are quantized with a scale per row; few rows are multiplied with the packed weight.

    Args:
        source: settings of the layer.
        quantization: how inputs are quantized.
        packed: the packed weight.
        bias_dtype: dtype of the stored bias.
    """

    most_packed_rows: ClassVar[int] = PACKED_ROWS

    def __init__(
        self, source: LinearSource, quantization: ActivationQuantization, packed: PackedWeight, bias_dtype: torch.dtype
    ) -> None:
        self.activation_quantization = self._quantization = quantization
        self._packed, self._bias = packed, source.bias_in(bias_dtype)
        super().__init__(source.weight.shape, packed.num_bytes + nbytes(self._bias), source.describe("Triton"))

    def __call__(self, x: Tensor | QuantizedActivations) -> Tensor:
        if isinstance(x, Tensor):
            if len(x) == 0:
                return x.new_empty(0, self.out_features)
            x = quantize_rows(x.contiguous(), self._quantization)
        product: Tensor | None = None
        if len(x) <= self.most_packed_rows:
            product = attempt("quantized_linear", x.scale.device, w4a16.multiply, x, self._packed, self._bias)
        return self._multiply(x) if product is None else product

    @abstractmethod
    def _multiply(self, rows: QuantizedActivations) -> Tensor:
        """Multiply without the packed kernel: for many rows, or for few rows if Triton refuses that kernel."""


class Int8Linear(_QuantizedInputsLinear):
    """A linear with INT8 weights, one scale per output, and INT8 inputs; sums are exact."""

    def __init__(self, source: LinearSource, quantization: ActivationQuantization) -> None:
        self._codes, self._scale = source.weight.codes, source.weight.scale.view(-1)
        super().__init__(source, quantization, packing.unpacked(source.weight), torch.float32)

    def _multiply(self, rows: QuantizedActivations) -> Tensor:
        # If Triton refused the packed product, the few rows lack the padding that `torch._int_mm` needs.
        missing = int_mm_rows(len(rows)) - len(rows.codes)
        codes = functional.pad(rows.codes, (0, 0, 0, missing)) if missing > 0 else rows.codes
        sums = torch._int_mm(codes, self._codes.t())[: len(rows)]
        return scale_sums(sums, rows.scale, self._scale, self._bias, rows.dtype)


class FP8Linear(_QuantizedInputsLinear):
    """A linear with FP8 weights, one scale per output, and FP8 inputs, for chips that multiply FP8."""

    def __init__(self, source: LinearSource, quantization: ActivationQuantization) -> None:
        self._codes, self._scale = source.weight.codes, source.weight.scale
        super().__init__(source, quantization, packing.unpacked(source.weight), torch.bfloat16)

    def _multiply(self, rows: QuantizedActivations) -> Tensor:
        codes = rows.codes[: len(rows)].view(torch.float8_e4m3fn)
        return scaled_mm(codes, rows.scale, self._codes, self._scale, self._bias).to(rows.dtype)


class PackedQuantizedLinear(_QuantizedInputsLinear):
    """A linear with any packed weight and quantized inputs. For many rows, both are first dequantized to 16 bits."""

    most_packed_rows = TILE_LIMIT

    def __init__(self, source: LinearSource, quantization: ActivationQuantization) -> None:
        self._dtype = source.dtype
        super().__init__(source, quantization, packing.pack(source.weight, source.device), source.dtype)

    def _multiply(self, rows: QuantizedActivations) -> Tensor:
        weight = w4a16.dequantize_weight(self._packed, self._dtype)
        return functional.linear(dequantize_rows(rows, self._dtype), weight, self._bias).to(rows.dtype)


def _round_groups(x: Tensor, group: int, quantization: ActivationQuantization) -> Tensor:
    """Quantize inputs to 8 bits in groups and dequantize them to 16 bits, because kernels sum over whole rows."""
    if len(x) == 0:
        return x
    return dequantize_rows(quantize_rows(x.contiguous().view(-1, group), quantization), x.dtype).view(x.shape)


def linear_of(source: LinearSource) -> Linear | None:
    """Build the layer on Triton's kernels; None if they do not support it."""
    weight, activation = source.weight, source.activation
    can_pack = packing.find_span(weight) is not None
    if activation is None:
        return PackedLinear(source) if can_pack else None
    quantization, group = quantization_of(weight, activation), activation.group_size
    if quantization is None or weight.group_index is not None:
        return None
    is_int8 = is_int8_by_output(weight, quantization.name) and fits_int_mm(weight) and weight.shape[1] <= _WIDEST
    if group is None and (is_int8 or fits_scaled_mm(source)):
        codes, scale = weight.codes.to(source.device).contiguous(), weight.scale.float().to(source.device)
        there = dataclasses.replace(source, weight=dataclasses.replace(weight, codes=codes, scale=scale))
        return Int8Linear(there, quantization) if is_int8 else FP8Linear(there, quantization)
    if not can_pack or (group is not None and weight.shape[1] % group):
        return None
    if group is not None:
        linear = PackedLinear(source)
        description = f"{linear.description}, activations {activation.describe()}"
        return WrappedLinear(linear, lambda x: _round_groups(x, group, quantization), description)
    return PackedQuantizedLinear(source, quantization)
