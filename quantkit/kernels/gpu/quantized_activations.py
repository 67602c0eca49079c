"""Linears whose inputs are rounded to 8 bits: which product for which weight and how many rows.

| weight, inputs                 | up to 16 rows | above                                                      |
|--------------------------------|---------------|------------------------------------------------------------|
| INT8 per output, INT8          | packed        | `torch._int_mm`; `int8` for shapes that it refuses         |
| FP8 per output, FP8            | packed        | `torch._scaled_mm` where there is one for chip and shape   |
| all others, these without one  | packed        | packed to about 64, then decoded with inputs as 16 bits    |

Inputs come as they are and are rounded in one launch, or rounded already by what produced them (`RoundedRows`).
Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels import torch_linear as _torch_linear
from quantkit.kernels.gpu import configs, int8, layout, w4a16, w8a8
from quantkit.kernels.gpu.choices import Vendor
from quantkit.kernels.gpu.linear import PackedLinear
from quantkit.kernels.quantized_activations import RoundedRows, Rounding
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

_PACKED_ROWS = 16
_WIDEST = 65536  # of sums of products of bytes in 32 bits
_ROUNDED = ("int8", "fp8")


def find_rounding(weight: QuantizedTensor, activation: ActivationScheme) -> Rounding | None:
    """How inputs are rounded, groups aside; None = not to 8 bits with scales that are numbers."""
    if activation.dtype.name not in _ROUNDED:
        return None
    if activation.dynamic:
        return Rounding(name=activation.dtype.name)
    if weight.input_scale is None:
        return None
    is_meta = weight.input_scale.is_meta
    return Rounding(name=activation.dtype.name, step=1.0 if is_meta else weight.input_scale.float().item())


class _Rounded(ABC):
    """What they have in common.

    Args:
        weight: (N, K).
        bias: (N,) or None, on the device.
        rounds: how inputs are rounded.
        activation: the same, for the description.
        num_bytes: of the weight, that a product with one row reads.
    """

    def __init__(
        self,
        weight: QuantizedTensor,
        bias: Tensor | None,
        rounds: Rounding,
        activation: ActivationScheme,
        num_bytes: int,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.rounds = rounds
        self._bias = bias
        self.stored_bytes = num_bytes + (0 if bias is None else bias.nbytes)
        self.description = f"{weight.scheme.describe()}, activations {activation.describe()} (Triton)"

    def __call__(self, x: Tensor | RoundedRows) -> Tensor:
        """(T, K) -> (T, N)."""
        if isinstance(x, RoundedRows):
            return self._multiply(x)
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        return self._multiply(w8a8.round_rows(x.contiguous(), self.rounds))

    @abstractmethod
    def _multiply(self, rows: RoundedRows) -> Tensor: ...

    def _packed_product(self, rows: RoundedRows, packed: layout.PackedWeight) -> Tensor:
        return w4a16.multiply(rows.codes[: len(rows)], packed, self._bias, rows.scale.view(-1), rows.dtype)


class Int8Linear(_Rounded):
    """INT8 weights with one scale per output, INT8 inputs; sums are exact."""

    def __init__(
        self,
        weight: QuantizedTensor,
        *,
        bias: Tensor | None,
        rounds: Rounding,
        activation: ActivationScheme,
        device: torch.device,
    ) -> None:
        self._codes = weight.codes.to(device).contiguous()
        self._scale = weight.scale.float().to(device)
        bias = None if bias is None else bias.float().to(device)
        super().__init__(weight, bias, rounds, activation, self._codes.nbytes + self._scale.nbytes)
        rows, width = weight.shape
        self._fits_vendor = rows % 8 == 0 and width % 8 == 0
        self._packed = None
        if width % 4 == 0:
            self._packed = layout.natural(dataclasses.replace(weight, codes=self._codes, scale=self._scale))

    def _multiply(self, rows: RoundedRows) -> Tensor:
        if self._packed is not None and len(rows) <= _PACKED_ROWS:
            return self._packed_product(rows, self._packed)
        if not self._fits_vendor or len(rows) <= _PACKED_ROWS:
            return int8.multiply(rows, self._codes, self._scale, self._bias)
        sums = torch._int_mm(rows.codes, self._codes.t())[: len(rows)]
        return w8a8.scale_sums(sums, rows.scale, self._scale.view(-1), self._bias, rows.dtype)


class FP8Linear(_Rounded):
    """FP8 weights with one scale per output, FP8 inputs, where the chip multiplies them."""

    def __init__(
        self,
        weight: QuantizedTensor,
        *,
        bias: Tensor | None,
        rounds: Rounding,
        activation: ActivationScheme,
        device: torch.device,
    ) -> None:
        codes, scale = weight.codes.to(device).contiguous(), weight.scale.float().to(device)
        self._packed = layout.natural(dataclasses.replace(weight, codes=codes, scale=scale))
        bias = None if bias is None else bias.to(device, torch.bfloat16)
        super().__init__(weight, bias, rounds, activation, self._packed.num_bytes)
        self._weight = codes.t()  # (K, N), column-major as cuBLAS wants it
        self._scale = scale.reshape(1, -1)  # (1, N)

    def _multiply(self, rows: RoundedRows) -> Tensor:
        if len(rows) <= _PACKED_ROWS:
            return self._packed_product(rows, self._packed)
        out = torch._scaled_mm(
            rows.codes[: len(rows)].view(torch.float8_e4m3fn),
            self._weight,
            scale_a=rows.scale,
            scale_b=self._scale,
            bias=self._bias,
            out_dtype=torch.bfloat16,
        )
        return out.to(rows.dtype)


class RoundedPackedLinear(_Rounded):
    """Any weight that can be packed. Above what the packed product is for, codes and weight become 16-bit numbers."""

    def __init__(
        self,
        weight: QuantizedTensor,
        *,
        bias: Tensor | None,
        rounds: Rounding,
        activation: ActivationScheme,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._packed, self._dtype = layout.pack(weight, device), dtype
        bias = None if bias is None else bias.to(device, dtype)
        super().__init__(weight, bias, rounds, activation, self._packed.num_bytes)

    def _multiply(self, rows: RoundedRows) -> Tensor:
        if not isinstance(configs.product(self._packed, len(rows), rows.scale.device), Vendor):
            return self._packed_product(rows, self._packed)
        values = w8a8.values_of(rows, self._dtype)
        return functional.linear(values, w4a16.decode(self._packed, self._dtype), self._bias).to(rows.dtype)


class RoundedGroups:
    """A linear whose inputs are rounded to 8 bits by groups of a row, and go on as 16-bit numbers.

    Args:
        linear: the product.
        rounds: how.
        activation: of groups that divide K.
    """

    def __init__(self, linear: PackedLinear, rounds: Rounding, activation: ActivationScheme) -> None:
        assert activation.group_size is not None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.stored_bytes = linear.stored_bytes
        self.description = f"{linear.description}, activations {activation.describe()}"
        self._linear, self._rounds, self._group = linear, rounds, activation.group_size

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if len(x) == 0:
            return self._linear(x)
        rows = w8a8.round_rows(x.contiguous().view(-1, self._group), self._rounds)
        return self._linear(w8a8.values_of(rows, x.dtype).view(x.shape))


def make_rounded(
    weight: QuantizedTensor,
    *,
    bias: Tensor | None,
    activation: ActivationScheme,
    dtype: torch.dtype,
    device: torch.device,
) -> Int8Linear | FP8Linear | RoundedPackedLinear | RoundedGroups | None:
    """The layer for a weight with inputs rounded like this; None where there is none.

    Args:
        weight: (N, K), inputs in order.
        bias: (N,) or None.
        activation: how inputs are rounded.
        dtype: of the computation.
        device: where it runs.
    """
    rounds, group = find_rounding(weight, activation), activation.group_size
    if rounds is None or weight.group_index is not None:
        return None
    if group is None and _is_int8(weight, rounds):
        return Int8Linear(weight, bias=bias, rounds=rounds, activation=activation, device=device)
    if group is None and _torch_linear.can_fp8(weight, activation, dtype, device):
        return FP8Linear(weight, bias=bias, rounds=rounds, activation=activation, device=device)
    if layout.find_span(weight) is None or (group is not None and weight.shape[1] % group):
        return None
    if group is not None:
        linear = PackedLinear(weight, bias=bias, dtype=dtype, device=device)
        return RoundedGroups(linear, rounds, activation)
    return RoundedPackedLinear(weight, bias=bias, rounds=rounds, activation=activation, dtype=dtype, device=device)


def _is_int8(weight: QuantizedTensor, rounds: Rounding) -> bool:
    return (
        rounds.name == weight.scheme.dtype.name == "int8"
        and weight.zero_point is None
        and weight.scale.shape[1] == 1
        and weight.shape[1] <= _WIDEST
    )
