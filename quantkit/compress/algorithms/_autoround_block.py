"""A decoder layer ready to be differentiated: weights as leaves, data by sample, the error of its output.

The pipeline runs under `torch.inference_mode`, whose tensors autograd refuses; while a layer is tuned its parameters
are replaced by ordinary copies. What is differentiated is only the layer itself: the gradient that arrives at a decoded
weight goes to `_autoround_weight`. Shapes: B sequences, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quantkit.compress.calibration.layer import LayerContext, hidden_states, hook_inputs
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

    def batch(self, number: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and outputs (B, T, D) of one batch of the store, or of some rows of it, as ordinary tensors."""
        target = self._target(number, rows) if self._targets is None else self._targets[number][rows]
        device = self._layer.device
        return self._store[number][rows].to(device, copy=True), target.to(device, copy=True)

    def _target(self, number: int, rows: slice = slice(None)) -> Tensor:
        return self._layer.original_forward(self._original[number][rows])


class TunedBlock:
    """The layer with weights that gradients are computed for; made by `tunable`.

    Args:
        layer: its block has ordinary parameters.
        linears: relative names of the linears that are tuned.
    """

    def __init__(self, layer: LayerContext, linears: tuple[str, ...]) -> None:
        self._layer, self.weights = layer, {name: layer.linear(name).weight for name in linears}

    def backward(self, hidden: Tensor, target: Tensor) -> float:
        """Add the gradients of this batch's error to those of the weights; the mean squared error over that of zero."""
        with torch.enable_grad():
            error = (self._forward(hidden).float() - target.float()).square().sum()
            size = target.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny)
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

    def _forward(self, hidden: Tensor) -> Tensor:
        # Copies, since autograd refuses tensors that inference mode has made.
        arguments = tree_map_only(Tensor, Tensor.clone, self._layer.arguments(hidden))
        return hidden_states(self._layer.block(hidden, **arguments))


@contextmanager
def tunable(layer: LayerContext, linears: tuple[str, ...]) -> Iterator[tuple[TunedBlock, Mapping[str, Tensor]]]:
    """While open, the layer can be differentiated; afterwards it has its weights back.

    Args:
        layer: not to be used otherwise meanwhile.
        linears: relative names of those to tune.
    Yields:
        The block, and the (N, K) weights of these linears as they were.
    """
    kept = {**dict(layer.block.named_parameters()), **dict(layer.block.named_buffers())}
    tuned = {f"{name}.weight" for name in linears}
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as hooks:
        for name, value in kept.items():
            copy = value.detach().clone()  # made outside inference mode: an ordinary tensor
            is_parameter = isinstance(value, nn.Parameter)
            _put(layer.block, name, nn.Parameter(copy, requires_grad=name in tuned) if is_parameter else copy)
        for name, scheme in layer.schemes.items():
            # A calibrated scale is found when all linears have codes: until then such inputs stay as they are.
            if scheme.activation is not None and not scheme.activation.is_calibrated:
                hooks.enter_context(hook_inputs(layer.linear(name), partial(_quantized, scheme=scheme.activation)))
        try:
            yield TunedBlock(layer, linears), {name: kept[f"{name}.weight"].data for name in linears}
        finally:
            for name, value in kept.items():
                _put(layer.block, name, value)


class _QuantizedInputs(torch.autograd.Function):
    """Inputs as the runtime will quantize them; the identity for gradients."""

    @staticmethod
    def forward(_: Any, values: Tensor, scheme: ActivationScheme) -> Tensor:
        return fake_quantize_inputs(values, scheme)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _quantized(values: Tensor, scheme: ActivationScheme) -> Tensor:
    inputs: Tensor = _QuantizedInputs.apply(values, scheme)  # type: ignore[no-untyped-call]
    return inputs


def _put(block: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or a buffer in the place of the one of this name."""
    owner, _, leaf = name.rpartition(".")
    module = block.get_submodule(owner)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module._buffers[leaf] = value
