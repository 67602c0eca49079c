"""Prepare a decoder layer for gradients: tunable copies of its weights, its inputs and targets, and its output error.

The pipeline runs under `torch.inference_mode`, and autograd does not accept tensors made in that mode. Tuning therefore
calls the layer with ordinary copies of its parameters. Autograd differentiates only the layer itself. The gradient of
each decoded weight goes to `_autoround_weight` as soon as it is complete. So if each step uses one sequence, memory
holds only one weight's gradient at a time.
Shapes: B sequences, T tokens, D hidden width; N outputs, K inputs of a linear.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from quantkit.compress.calibration.layer import LayerContext
from quantkit.huggingface.layer_call import Batch, hidden_states, states_of
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.scheme import ActivationScheme
from quantkit.output.writer import write_shard

# Factor that keeps the gradients of float16 layers away from both ends of float16's range; their signs do not change.
_LOSS_SCALE = 1024.0

Step = Callable[[str, Tensor, Tensor], None]
"""Function that updates a weight, given the linear's name, the weight's gradient and the weight, both (N, K)."""


class Examples:
    """Inputs of a layer in the quantized model, with the layer's outputs in the original model as targets.

    Args:
        layer: the layer, with the hidden states of both models. The targets are stored where the hidden states are, in
            memory or on disk.
    Attributes:
        sequences: batch number and row of each sequence.
    """

    def __init__(self, layer: LayerContext) -> None:
        self._device, self._store, self._target = layer.device, layer.store, _targets(layer)
        self.sequences = [
            (number, slice(row, row + 1)) for number, batch in enumerate(self._store) for row in range(batch.shape[0])
        ]

    def batch(self, number: int, rows: slice = slice(None)) -> tuple[Batch, Tensor]:
        """Return the inputs and the target outputs (B, T, D) of one batch, or of some rows of the batch.

        The tensors are not inference-mode tensors, so autograd accepts them.
        """
        states, target = self._store[number][rows], states_of(self._target(number))
        if isinstance(states, Tensor):  # a `LayerCall` is one sequence, and its first dimension may be residual streams
            target = target[rows]
        # Always copied, because the store may hold inference-mode tensors, which autograd does not accept.
        return states.to(self._device, copy=True), target.to(self._device, copy=True)


def _targets(layer: LayerContext) -> Callable[[int], Batch]:
    """Return a function that, given a batch's number, returns the original layer's output for this batch.

    Each output is computed only once.
    """
    data, beside = layer.data, layer.store.beside
    if data.targets is not None:
        return list(data.targets).__getitem__ if layer.store.in_memory else data.targets.__getitem__
    original = data.original
    assert original is not None and original.store is not None, "tuning needs data of both models"
    # Outputs go back to the CPU, so that the device holds one at a time.
    made = (original.forward(batch).to("cpu") for batch in original.store)
    return list(made).__getitem__ if layer.store.in_memory or beside is None else _saved(beside / "targets", made)


def _saved(folder: Path, tensors: Iterable[Tensor]) -> Callable[[int], Tensor]:
    """Write each tensor to its own file. Return a function that, given a tensor's number, reads the tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, tensor in enumerate(tensors):
        write_shard(folder / str(number), {"target": tensor})
    return lambda number: load((folder / str(number)).read_bytes())["target"]


class TunedBlock:
    """A layer that computes with tunable copies of its weights; created by `tunable`. *Mutable*.

    Args:
        layer: the layer, called with `values` in place of its parameters and buffers.
        values: tensors made outside inference mode, keyed by the relative name of the parameter or buffer.
        weights: the tensors of `values` to tune, keyed by the linear's relative name.
    """

    def __init__(self, layer: LayerContext, values: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        self._layer, self._values, self.weights = layer, values, weights
        self._calls = dict.fromkeys(weights, 0)  # per linear: calls that ran forwards but not yet backwards
        self._sums: dict[str, Tensor] = {}  # gradients to which later calls or batches will add
        self._step: Step | None = None
        self._gradient = torch.empty(0)  # memory that all linears use in turns

    def backward(self, hidden: Batch, target: Tensor, step: Step | None) -> float:
        """Backpropagate this batch's relative error (squared error / squared norm of the target), and return it.

        Args:
            hidden, target: inputs and target outputs of the batch; see `Examples.batch`.
            step: called once for each linear that received a gradient, as soon as that gradient is complete; not called
                if the error is not finite. None = keep the gradients, so that later batches can add theirs.
        """
        self._step, self._calls = step, dict.fromkeys(self.weights, 0)
        with torch.enable_grad():
            error = self._error(hidden, target)
            size = target.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny)
            relative = float(error.detach() / size)
            if not math.isfinite(relative):
                return relative
            # Divided by the norm of the target, so that the gradients of every layer fit into float16.
            (error * (_LOSS_SCALE / size)).backward()  # type: ignore[no-untyped-call]
        self._finish()
        return relative

    def _finish(self) -> None:
        """Call `step` for linears whose gradient autograd computed, and for linears that only earlier batches used."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self._sums[name] = weight.grad.add_(self._sums.pop(name, 0))
                weight.grad = None
            if self._step is not None and name in self._sums:
                self._step(name, self._sums.pop(name), weight)

    def multiply(self, name: str, linear: nn.Linear, inputs: Tensor) -> Tensor:
        """Return a linear's output, computed with the tunable weight; the weight's gradient goes to `_take`."""
        self._calls[name] += torch.is_grad_enabled()
        take = partial(self._take, name)
        outputs: Tensor = _Product.apply(inputs, linear.weight, linear.bias, take)  # type: ignore[no-untyped-call]
        return outputs

    def _take(self, name: str, outputs: Tensor, inputs: Tensor) -> None:
        """Add the contribution of one call to a weight's gradient: the gradient of the call's outputs (T, N),
        transposed, times the call's inputs (T, K). After the last call, run `step`.
        """
        weight = self.weights[name]
        if self._gradient.numel() < weight.numel():
            self._gradient = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device)
        gradient = torch.mm(outputs.T, inputs, out=self._gradient[: weight.numel()].view_as(weight))
        self._calls[name] -= 1
        if name in self._sums:
            gradient += self._sums.pop(name)
        # Only after the last call, because a weight must stay unchanged until all its calls have been run backwards.
        if self._step is not None and not self._calls[name]:
            self._step(name, gradient, weight)
        else:
            self._sums[name] = gradient.clone()

    @torch.no_grad()
    def error(self, examples: Examples, sequences: Iterable[tuple[int, slice]]) -> float:
        """Return the squared error of the layer's outputs for some sequences, relative to the targets' squared norm."""
        wrong = total = 0.0
        for number, rows in sequences:
            hidden, target = examples.batch(number, rows)
            wrong += self._error(hidden, target).item()
            total += target.float().square().sum().item()
        return wrong / total if total > 0 else 0.0

    def _error(self, hidden: Batch, target: Tensor) -> Tensor:
        # Copies, because autograd does not accept inference-mode tensors.
        arguments = tree_map_only(Tensor, Tensor.clone, self._layer.stream.arguments(hidden))
        output = hidden_states(functional_call(self._layer.block, self._values, (states_of(hidden),), arguments))
        assert output.shape == target.shape, "output and target have different shapes"
        return (output.float() - target.float()).square().sum()


@contextmanager
def tunable(layer: LayerContext, linears: tuple[str, ...]) -> Iterator[TunedBlock]:
    """Yield a block that computes as the layer does, but with tunable copies of the parameters of the layer.

    Args:
        layer: the layer. Inside the context, its linears receive quantized inputs, as at run time.
        linears: relative names of the linears to tune.
    """
    kept = {**dict(layer.block.named_parameters()), **dict(layer.block.named_buffers())}
    with ExitStack() as stack:
        for opened in (torch.inference_mode(False), torch.no_grad(), layer.quantized_inputs(layer.schemes, _quantized)):
            stack.enter_context(opened)
        values = {name: value.detach().clone() for name, value in kept.items()}  # inference mode is off
        block = TunedBlock(layer, values, {name: values[f"{name}.weight"].requires_grad_() for name in linears})
        for name in linears:
            linear = layer.linear(name)
            if type(linear).forward is not nn.Linear.forward:
                continue  # autograd computes the gradient of this linear, see `_finish`
            vars(linear)["forward"] = partial(block.multiply, name, linear)  # overrides the class's method
            stack.callback(vars(linear).pop, "forward")
        yield block


class _Product(torch.autograd.Function):
    """The product x W' + b. Autograd does not compute the gradient of W; the function `take` does so."""

    @staticmethod
    def forward(  # type: ignore[override]
        context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, take: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        context.save_for_backward(inputs)
        # `save_for_backward` cannot hold the weight: autograd would raise an error once a step has changed it.
        context.weight, context.take = weight, take
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        (inputs,), weight = context.saved_tensors, context.weight
        back = gradient @ weight if context.needs_input_grad[0] else None
        context.take(gradient.reshape(-1, weight.shape[0]), inputs.reshape(-1, weight.shape[1]))
        return back, None, None, None


class _QuantizedInputs(torch.autograd.Function):
    """Quantization of inputs as in the runtime; gradients pass through it unchanged."""

    @staticmethod
    def forward(_: Any, values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
        return fake_quantize_inputs(values, scheme, scale)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient, None, None


def _quantized(values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
    inputs: Tensor = _QuantizedInputs.apply(values, scheme, scale)  # type: ignore[no-untyped-call]
    return inputs
