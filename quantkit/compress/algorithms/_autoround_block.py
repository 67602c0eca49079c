"""A decoder layer ready to be differentiated: weights as leaves, data by sample, the error of its output.

The pipeline runs under `torch.inference_mode`, whose tensors autograd refuses; while a layer is tuned it is called with
ordinary copies of its parameters. What is differentiated is only the layer itself: the gradient that arrives at a
decoded weight goes to `_autoround_weight`. Shapes: B sequences, T tokens, D hidden width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from quantkit.checkpoints.layer_call import Batch, states_of
from quantkit.compress.calibration.layer import LayerContext, hidden_states
from quantkit.numerics.inputs import fake_quantize_inputs
from quantkit.numerics.scheme import ActivationScheme

# Keeps gradients of float16 layers away from both ends of its range; signs do not depend on it.
_LOSS_SCALE = 1024.0


class Examples:
    """Inputs of a layer as the quantized model makes them, with the outputs of the original one.

    Args:
        layer: with the hidden states of both models. Outputs are computed once where hidden states are kept in memory,
            else whenever they are needed.
    Attributes:
        sequences: batch and row of each.
    """

    def __init__(self, layer: LayerContext) -> None:
        assert layer.data.store is not None and layer.data.original_store is not None, (
            "tuning needs data of both models"
        )
        self._layer, self._store, self._original = layer, layer.data.store, layer.data.original_store
        self._targets = [self._target(number) for number in range(len(self._store))] if self._store.in_memory else None
        self.sequences = [
            (number, slice(row, row + 1)) for number, batch in enumerate(self._store) for row in range(batch.shape[0])
        ]

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._store)

    def batch(self, number: int, rows: slice = slice(None)) -> tuple[Batch, Tensor]:
        """Inputs and outputs (B, T, D) of one batch of the store, or of some rows of it, as ordinary tensors."""
        target = self._target(number, rows) if self._targets is None else self._targets[number][rows]
        device = self._layer.device
        # Copied in any case: the store may hold tensors of inference mode, which autograd refuses.
        return self._store[number][rows].to(device, copy=True), target.to(device, copy=True)

    def _target(self, number: int, rows: slice = slice(None)) -> Tensor:
        return self._layer.original_forward(self._original[number][rows])


class TunedBlock:
    """The layer with weights that gradients are computed for; made by `tunable`.

    Args:
        layer: called with `values` in place of its parameters and buffers.
        values: ordinary tensors by relative name.
        weights: those of them that are tuned, by relative name of the linear.
    """

    def __init__(self, layer: LayerContext, values: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        self._layer, self._values, self.weights = layer, values, weights

    def backward(self, hidden: Batch, target: Tensor) -> float:
        """Add the gradients of this batch's error to those of the weights; the mean squared error over that of zero."""
        with torch.enable_grad():
            error = (self._forward(hidden).float() - target.float()).square().sum()
            size = target.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny)
            # Relative to the size of the output: gradients then suit float16, whatever the layer.
            (error * (_LOSS_SCALE / size)).backward()  # type: ignore[no-untyped-call]
            return float(error.detach() / size)

    @torch.no_grad()
    def error(self, examples: Examples, batches: range) -> float:
        """Squared error of the output over these batches, relative to the output."""
        wrong = total = 0.0
        for number in batches:
            hidden, target = examples.batch(number)
            wrong += (self._forward(hidden).float() - target.float()).square().sum().item()
            total += target.float().square().sum().item()
        return wrong / total if total > 0 else 0.0

    def _forward(self, hidden: Batch) -> Tensor:
        # Copies, since autograd refuses tensors that inference mode has made.
        arguments = tree_map_only(Tensor, Tensor.clone, self._layer.arguments(hidden))
        return hidden_states(functional_call(self._layer.block, self._values, (states_of(hidden),), arguments))


@contextmanager
def tunable(layer: LayerContext, linears: tuple[str, ...]) -> Iterator[TunedBlock]:
    """While open, a copy of the layer's parameters can be tuned; the layer itself keeps its own.

    Args:
        layer: its inputs are quantized meanwhile as the runtime will, whether it has codes or not.
        linears: relative names of those to tune.
    """
    kept = {**dict(layer.block.named_parameters()), **dict(layer.block.named_buffers())}
    with torch.inference_mode(False), torch.no_grad(), layer.quantized_inputs(layer.schemes, _quantized):
        values = {name: value.detach().clone() for name, value in kept.items()}  # outside inference mode: ordinary
        tuned = {name: values[f"{name}.weight"].requires_grad_() for name in linears}
        yield TunedBlock(layer, values, tuned)


class _QuantizedInputs(torch.autograd.Function):
    """Inputs as the runtime will quantize them; the identity for gradients."""

    @staticmethod
    def forward(_: Any, values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
        return fake_quantize_inputs(values, scheme, scale)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient, None, None


def _quantized(values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
    inputs: Tensor = _QuantizedInputs.apply(values, scheme, scale)  # type: ignore[no-untyped-call]
    return inputs
