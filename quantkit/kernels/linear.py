"""Linear layers laid out for one kernel: which one is decided here, once, when a weight is loaded.

Weights come kernel-agnostic (`Tensor` or `QuantizedTensor`) and leave as a `Linear` that can only multiply. What the
numbers mean is in `numerics`; the kernels are in `native` (C, this machine's instructions), `triton` and in torch.
Shapes: T tokens, N outputs, K inputs, G scales per row, g = K / G.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels import torch_linear as _torch_linear
from quantkit.kernels.cpu import linear as _native_linear
from quantkit.kernels.quantized_activations import RoundedRows, Rounding
from quantkit.numerics.inputs import fake_quantize_inputs
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor


class Linear(Protocol):
    """A linear layer whose weight is laid out for one kernel; no autograd.

    Attributes:
        in_features, out_features: K and N.
        stored_bytes: what one decode step reads.
        description: number type and kernel, e.g. `int4 g128 (native)`.
    """

    in_features: int
    out_features: int
    stored_bytes: int
    description: str

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: (T, K), any float dtype, T may be 0; not modified.
        Returns:
            (T, N) in the dtype of x.
        """
        ...


def rounding_of(linear: object) -> Rounding | None:
    """How a linear, or what begins with one, rounds its inputs, if it takes rows that are rounded so already."""
    return getattr(linear, "rounds", None)


def multiply(linear: Linear, x: Tensor | RoundedRows) -> Tensor:
    """`linear(x)`; rounded rows only where `rounding_of` says how."""
    return linear(x)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLinear:
    """What `Linear` says of one linear of an expert that is part of a stack; see there."""

    in_features: int
    out_features: int
    stored_bytes: int
    description: str


class _Permuted:
    """A linear whose inputs are reordered first, because its groups are not made of neighbours."""

    def __init__(self, linear: Linear, order: Tensor) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.stored_bytes = linear.stored_bytes
        self.description = linear.description
        self._linear = linear
        self._order = order

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.index_select(1, self._order))


class _RoundedInputs:
    """A linear whose input is rounded first, in a way that its kernel does not do by itself."""

    def __init__(self, linear: Linear, activation: ActivationScheme, scale: Tensor | None) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.stored_bytes = linear.stored_bytes
        self.description = f"{linear.description}, activations {activation.describe()}"
        self._linear, self._activation, self._scale = linear, activation, scale

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(fake_quantize_inputs(x, self._activation, self._scale))


def make_linear(
    weight: Tensor | QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: ActivationScheme | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Lay a weight out for the fastest kernel that this machine has for it.

    Args:
        weight: (N, K); not to be used afterwards, its memory may be taken over.
        bias: (N,), added after the product.
        activation: the input is rounded to this number type at run time; a calibrated scale comes with the weight.
        dtype: of the computation; accumulation is in float32, and integers are multiplied exactly.
        device: where the layer runs.
    """
    if isinstance(weight, Tensor):
        return _make_dense(weight, bias, activation, dtype, device, "dense")
    on_gpu = _make_triton(weight, bias, activation, dtype, device)
    if on_gpu is not None:
        return on_gpu
    if activation is not None and not activation.is_per_token:
        scale = None if weight.input_scale is None else weight.input_scale.to(device)
        linear = make_linear(weight, bias=bias, activation=None, dtype=dtype, device=device)
        return _RoundedInputs(linear, activation, scale)
    if weight.group_index is not None:
        ordered = _sort_groups(weight)
        if ordered is None:
            return _decode(weight, bias, activation, dtype, device)
        weight, order = ordered
        linear = make_linear(weight, bias=bias, activation=activation, dtype=dtype, device=device)
        return _Permuted(linear, order.to(device))
    if _native_linear.available(device) and _native_linear.can_quantized(weight):
        return _native_linear.quantized(weight, bias=bias, activation=activation, dtype=dtype)
    if activation is not None and _torch_linear.can_int8(weight, activation, device):
        return _torch_linear.Int8Linear(weight, bias=bias, activation=activation, device=device)
    if activation is not None and _torch_linear.can_fp8(weight, activation, dtype, device):
        return _torch_linear.FP8Linear(weight, bias=bias, activation=activation, device=device)
    if activation is None and _torch_linear.can_int4(weight, dtype, device):
        return _torch_linear.Int4Linear(weight, bias=bias, device=device)
    return _decode(weight, bias, activation, dtype, device)


def _make_triton(
    weight: QuantizedTensor,
    bias: Tensor | None,
    activation: ActivationScheme | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear | None:
    """The layer on Triton's kernels; None where they are not for it."""
    if not gpu.is_used(device) or dtype not in (torch.bfloat16, torch.float16):
        return None
    from quantkit.kernels.gpu import linear as packed
    from quantkit.kernels.gpu import quantized_activations as rounded

    if activation is None:
        return packed.PackedLinear(weight, bias=bias, dtype=dtype, device=device) if packed.can(weight) else None
    return rounded.make_rounded(weight, bias=bias, activation=activation, dtype=dtype, device=device)


def _decode(
    weight: QuantizedTensor,
    bias: Tensor | None,
    activation: ActivationScheme | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """The reference: decoded once."""
    return _make_dense(weight.dequantize(dtype), bias, activation, dtype, device, f"{weight.scheme.describe()} decoded")


def _make_dense(
    weight: Tensor,
    bias: Tensor | None,
    activation: ActivationScheme | None,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> Linear:
    if activation is None and _native_linear.available(device):
        return _native_linear.dense(weight, bias=bias, dtype=dtype, name=name)
    described = name if activation is None else f"{name}, activations {activation.describe()}"
    return _torch_linear.DenseLinear(
        weight.to(device, dtype),
        bias=None if bias is None else bias.to(device, dtype),
        activation=activation,
        description=f"{described} {str(dtype).removeprefix('torch.')} (torch)",
    )


def _sort_groups(weight: QuantizedTensor) -> tuple[QuantizedTensor, Tensor] | None:
    """The same weight with its groups made of neighbours, and the order that inputs must take.

    Returns:
        weight without group_index, and order (K,) int64; None when groups differ in size.
    """
    index = cast(Tensor, weight.group_index).long()
    num_groups = weight.scale.shape[1]
    counts = torch.bincount(index, minlength=num_groups)
    if len(counts) != num_groups or bool((counts != len(index) // num_groups).any()):
        return None
    order = torch.argsort(index, stable=True)
    codes = weight.codes.view(torch.uint8)[:, order].view(weight.codes.dtype)
    return dataclasses.replace(weight, codes=codes, group_index=None), order


def join(weights: Sequence[Tensor] | Sequence[QuantizedTensor]) -> Tensor | QuantizedTensor | None:
    """Stack weights that read the same input, so that one product serves them all.

    Args:
        weights: each (N_i, K), e.g. of q, k and v, or of gate and up.
    Returns:
        (sum of N_i, K); None when they cannot be one weight: other number types, groups or widths.
    """
    if all(isinstance(weight, Tensor) for weight in weights):
        return _join_tensors(cast("Sequence[Tensor]", weights))
    if all(isinstance(weight, QuantizedTensor) for weight in weights):
        return _join_quantized(cast("Sequence[QuantizedTensor]", weights))
    return None


def _join_tensors(weights: Sequence[Tensor]) -> Tensor | None:
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) != 1:
        return None
    return torch.cat(list(weights))


def _join_quantized(weights: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    first = weights[0]
    kinds = {(w.scheme, w.scale.dtype, w.scale.shape[1], w.shape[1], w.zero_point is None) for w in weights}
    inputs = {None if w.input_scale is None else w.input_scale.item() for w in weights}
    if len(kinds) != 1 or len(inputs) != 1 or not all(_same_groups(first.group_index, w.group_index) for w in weights):
        return None
    codes = torch.cat([w.codes.view(torch.uint8) for w in weights]).view(first.codes.dtype)
    outer = [None if w.global_scale is None else w.global_scale.item() for w in weights]
    zeros = [w.zero_point for w in weights if w.zero_point is not None]
    return QuantizedTensor(
        codes=codes,
        scale=torch.cat([w.scale for w in weights]),
        zero_point=torch.cat(zeros) if zeros else None,
        scheme=first.scheme,
        group_index=first.group_index,
        global_scale=first.global_scale if len(set(outer)) == 1 else None,
        input_scale=first.input_scale,
    )


def _same_groups(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
