"""Trainable numbers of a compressed model: the scales of its linears, and the vectors (norms, biases) beside them.

Each parameter holds a `change`, which starts at zero. Changes are relative, so one step size suits all parameters.
Codes and zero points never change, so every format that stores the checkpoint can store the result.
Shapes: N outputs, K inputs, G scales per row.
Source: Chen et al. 2024, EfficientQAT: Efficient Quantization-Aware Training for Large Language Models (section 3.3).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.numerics.dtype import FP8
from quantkit.numerics.scales import round_scale, row_scales, two_level_scale
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor


def is_trainable(scheme: WeightScheme) -> bool:
    """Whether a weight's scales can be trained: each row has its own scales, and they are not only powers of two."""
    return scheme.block_rows == 1 and scheme.dtype.scale in ("float", "e4m3")


class TrainedScales:
    """Scales of one linear: value = (code - zero) * stored(scale * (1 + change)). *Mutable*: training sets `change`.

    `stored` rounds to the numbers that the checkpoint's format can store. Gradients pass through it unchanged. If
    `is_trainable` is false, `change` is None and the scales stay fixed.

    Args:
        weight: the weight as the checkpoint stores it.
        scheme: scheme of the linear.
        device: device of the computation.
    Attributes:
        change: (N, G) float32, or None.
    """

    def __init__(self, weight: QuantizedTensor, scheme: LinearScheme, device: torch.device) -> None:
        moved = {
            name: value.to(device)
            for name in ("codes", "scale", "zero_point", "group_index", "global_scale", "input_scale")
            if (value := getattr(weight, name)) is not None
        }
        self.weight, self.scheme = replace(weight, **moved), scheme
        self._start = self.weight.scale.float()
        self.change = torch.zeros_like(self._start).requires_grad_() if is_trainable(weight.scheme) else None

    def result(self) -> QuantizedTensor:
        """Return the weight with the trained scales."""
        return self.weight if self.change is None else replace(self.weight, scale=self._stored(self.change.detach()))

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear's output (..., N) for inputs (..., K), in the same dtype. Gradients reach `change`."""
        change = self._start if self.change is None else self.change
        outputs: Tensor = _Product.apply(inputs, change, bias, self)  # type: ignore[no-untyped-call]
        return outputs

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values (N, K) of the codes with the present scales."""
        return self.result().dequantize(dtype)

    def gradient(self, of_values: Tensor) -> Tensor:
        """Return the gradient of `change` (N, G), given the gradient of the values (N, K)."""
        steps = replace(self.weight, scale=torch.ones_like(self._start)).dequantize()  # code - zero
        products = steps.mul_(of_values)
        if self.weight.group_index is None:
            sums = products.view(len(products), self._start.shape[1], -1).sum(-1)
        else:
            sums = torch.zeros_like(self._start).index_add_(1, self.weight.group_index, products)
        return sums * self._start

    def _stored(self, change: Tensor) -> Tensor:
        """Return the scales (N, G) for these changes, rounded as the format stores them, in the stored dtype."""
        scale, stored, activation = self._start * (1 + change), self.weight.scale.dtype, self.scheme.activation
        if self.weight.global_scale is not None:
            rounded = two_level_scale(scale, self.weight.global_scale)
        elif activation is not None and activation.dtype == FP8 and self.weight.scheme.dtype.kind == "int":
            rounded = row_scales(scale, stored)
        else:
            rounded = round_scale(scale, stored)
        # Other tools round otherwise: what training does not change stays, and so do scales of 0.
        return torch.where((change == 0) | (self._start == 0), self._start, rounded).to(stored)


class TrainedVector:
    """A vector of a layer, such as a norm's weight: start + rms * change. *Mutable*: training sets `change`.

    `rms` is the root mean square of the start.

    Args:
        start: the vector as the checkpoint stores it.
        device: device of the computation.
    Attributes:
        change: float32, of the vector's shape.
    """

    def __init__(self, start: Tensor, device: torch.device) -> None:
        self._start, self._dtype = start.to(device, torch.float32), start.dtype
        self._rms = self._start.square().mean().sqrt().clamp_min(1e-3)
        self.change = torch.zeros_like(self._start).requires_grad_()

    def value(self) -> Tensor:
        """Return the present vector in float32. Gradients reach `change`."""
        value = self._start + self._rms * self.change
        return value + (value.to(self._dtype).float() - value).detach()  # gradients pass through rounding unchanged

    def result(self) -> Tensor:
        """Return the vector in the dtype of the checkpoint."""
        return self.value().detach().to(self._dtype)


class _Product(torch.autograd.Function):
    """The product x W' + b, where W is decoded when it is needed, so that no decoded copy stays in memory."""

    @staticmethod
    def forward(  # type: ignore[override]
        context: Any, inputs: Tensor, change: Tensor, bias: Tensor | None, scales: TrainedScales
    ) -> Tensor:
        context.save_for_backward(inputs)
        context.scales = scales
        return nn.functional.linear(inputs, scales.values(inputs.dtype), bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inputs,), scales = context.saved_tensors, context.scales
        needs_inputs, needs_change, needs_bias, _ = context.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        back = gradient @ scales.values(gradient.dtype) if needs_inputs else None
        # Sums over all tokens may exceed float16's range.
        wide = torch.bfloat16 if gradient.dtype == torch.float16 else gradient.dtype
        of_values = rows.to(wide).T @ inputs.reshape(-1, inputs.shape[-1]).to(wide) if needs_change else None
        return (
            back,
            None if of_values is None else scales.gradient(of_values),
            rows.sum(0) if needs_bias else None,
            None,
        )
