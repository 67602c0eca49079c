"""Linears, and the experts of a layer, in the layout of the kernel that is chosen when a weight is loaded.

`build_linear` converts a kernel-independent weight (`Tensor` or `QuantizedTensor`) to a `Linear`, which can only
multiply. `numerics` defines the numbers. The kernels are in `kernels.cpu` (C, this machine's instructions),
`kernels.gpu` (Triton) and `kernels.torch_linear`. Experts are stacked only if Triton's kernels can run them together;
otherwise `reference.experts` runs them one by one.
Shapes: T tokens, N outputs, K inputs, G scales per row, g = K / G.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels import torch_linear as torch_kernels
from quantkit.kernels.cpu import linear as on_cpu
from quantkit.kernels.reference.ops import DenseLinear
from quantkit.kernels.types import Linear, LinearSettings, LinearSource, StackedExperts, WrappedLinear, describe_linear
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor, join_rows


def build_linear(
    weight: Tensor | QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: ActivationScheme | None = None,
    dtype: torch.dtype,
    device: torch.device,
    rounds_inputs: bool = False,
) -> Linear:
    """Convert a weight to the layout of the fastest kernel on this machine.

    Args:
        weight: (N, K). The caller must not use it after the call, because its memory may be reused.
        bias: (N,), added after the product.
        activation: scheme with which inputs are quantized at run time; a calibrated scale is part of the weight. None =
            inputs are not quantized.
        dtype: dtype of the computation; sums are in float32, and integer products are exact.
        device: target device.
        rounds_inputs: see `LinearSettings`.
    """
    if isinstance(weight, Tensor):
        return _dense(weight, "dense", LinearSettings(bias=bias, activation=activation, dtype=dtype, device=device))
    source = LinearSource(
        weight=weight, bias=bias, activation=activation, dtype=dtype, device=device, rounds_inputs=rounds_inputs
    )
    return _quantized(source)


def _quantized(source: LinearSource) -> Linear:
    zero = source.weight.zero_point
    if zero is not None and zero.is_floating_point():  # minimums of GGUF types, which only the CPU's kernels take
        fast: Linear | None = on_cpu.linear_of(source)
    else:
        fast = _on_gpu(source) or _prepared(source)
        if fast is None and source.weight.group_index is None:
            fast = on_cpu.linear_of(source) or torch_kernels.linear_of(source)
    if fast is not None:
        return fast
    weight, name = source.weight.dequantize(source.dtype), f"{source.weight.scheme.describe()} dequantized"
    return _dense(weight, name, source)


def _on_gpu(source: LinearSource) -> Linear | None:
    """Return the layer on Triton's kernels; None if they do not support it."""
    on_gpu = gpu.module("quantized_linear", source.device)
    if on_gpu is None or source.dtype not in (torch.bfloat16, torch.float16):
        return None
    return cast("Linear | None", on_gpu.linear_of(source))


def _prepared(source: LinearSource) -> Linear | None:
    """Return a layer that transforms its inputs before the kernel; None if that is not needed or not possible."""
    weight, activation = source.weight, source.activation
    if activation is not None and not activation.is_per_token:
        scale = None if weight.input_scale is None else weight.input_scale.to(source.device)
        linear = _quantized(dataclasses.replace(source, activation=None, rounds_inputs=False))
        description = f"{linear.description}, activations {activation.describe()}"
        return WrappedLinear(linear, lambda x: fake_quantize_inputs(x, activation, scale), description)
    ordered = None if weight.group_index is None else _sort_groups(weight)
    if ordered is None:
        return None
    # Kernels read groups of neighbouring inputs. Reordering a step's inputs is cheaper than an index for every weight.
    order = ordered[1].to(source.device)
    return WrappedLinear(_quantized(dataclasses.replace(source, weight=ordered[0])), lambda x: x.index_select(1, order))


def _dense(weight: Tensor, name: str, settings: LinearSettings) -> Linear:
    activation, dtype = settings.activation, settings.dtype
    if activation is None and on_cpu.available(settings.device):
        return on_cpu.dense(weight, bias=settings.bias, dtype=dtype, name=name)
    description = describe_linear(f"{name} {str(dtype).removeprefix('torch.')}", activation, "torch")
    linear = DenseLinear(weight.to(settings.device, dtype), bias=settings.bias_in(dtype), description=description)
    if activation is None:
        return linear
    return WrappedLinear(linear, lambda x: fake_quantize_inputs(x, activation), description)


def _sort_groups(weight: QuantizedTensor) -> tuple[QuantizedTensor, Tensor] | None:
    """Reorder the inputs of a weight so that each group is contiguous.

    Returns:
        The weight without group_index, and the order of the inputs (K,) int64; None if groups differ in size.
    """
    index = cast(Tensor, weight.group_index).long()
    num_groups = weight.scale.shape[1]
    counts = torch.bincount(index, minlength=num_groups)
    if len(counts) != num_groups or bool((counts != len(index) // num_groups).any()):
        return None
    order = torch.argsort(index, stable=True)
    # As bytes, because torch cannot index FP8 on every device.
    codes = weight.codes.view(torch.uint8)[:, order].view(weight.codes.dtype)
    return dataclasses.replace(weight, codes=codes, group_index=None), order


def join(weights: Sequence[Tensor] | Sequence[QuantizedTensor]) -> Tensor | QuantizedTensor | None:
    """Concatenate weights that read the same input along their outputs, so that one product replaces several.

    Args:
        weights: each (N_i, K), e.g. of q, k and v, or of gate and up.
    Returns:
        (sum of N_i, K); None if number types, groups or widths differ.
    """
    if tensors := [weight for weight in weights if isinstance(weight, Tensor)]:
        alike = len(tensors) == len(weights) and len({(w.dtype, w.device, w.shape[1]) for w in tensors}) == 1
        return torch.cat(tensors) if alike else None
    quantized = cast("Sequence[QuantizedTensor]", weights)
    if len({_kind(weight) for weight in quantized}) != 1:
        return None
    joined, outer = join_rows(quantized), {_number(weight.global_scale) for weight in quantized}
    # Without a common global scale, kernels keep the scales of groups as float numbers.
    return joined if len(outer) == 1 else dataclasses.replace(joined, global_scale=None)


def _kind(weight: QuantizedTensor) -> tuple[object, ...]:
    """Return the properties that weights must have in common to be joined."""
    index, scale = weight.group_index, weight.scale
    groups = None if index is None else tuple(index.tolist())
    sizes = weight.shape[1], scale.shape[1], scale.dtype
    return weight.scheme, *sizes, weight.zero_point is None, groups, _number(weight.input_scale)


def _number(scale: Tensor | None) -> float | None:
    return None if scale is None else scale.item()


def can_stack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels can run stacked experts on this device in this dtype, if their format allows it."""
    return gpu.module("experts", device) is not None and dtype in (torch.bfloat16, torch.float16)


def stack(experts: Iterable[tuple[Linear, Linear]], *, count: int, activation: str) -> StackedExperts | str:
    """Combine the experts of a layer into one module.

    Args:
        experts: yields two linears for each expert: gate and up joined, and down. Each linear is freed after use.
        count: number of experts.
        activation: activation of the gate.
    Returns:
        The stacked experts, or the reason why they must run one by one.
    """
    from quantkit.kernels.gpu import experts as on_gpu

    return on_gpu.stack(experts, count=count, activation=activation)
