"""The two models of a distillation, both computed layer by layer, and the KL divergence between their logits.

The original runs once: only its hidden states after the last layer are kept, from which its head computes logits again
for each step. The compressed model stays in memory as codes. A backward pass repeats the forward pass of one layer at a
time, so memory holds the intermediate results of one layer only.
Shapes: B sequences, T tokens, R = B T rows, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import kl_div, log_softmax
from torch.utils._pytree import tree_map_only

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.compress.convert.source import Source
from quantkit.compress.convert.target import storable
from quantkit.compress.distill.parameters import TrainedScales, TrainedVector
from quantkit.errors import SchemeError
from quantkit.huggingface.layer_call import hidden_states
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.config import ConfigReader
from quantkit.numerics.activation_quant import fake_quantize_inputs

_LOGITS_BYTES = 1 << 26  # size of the float32 logits that are computed at once


class Head:
    """Final norm and output head of a model.

    Args:
        skeleton: the model.
        weight: (V, D) head that another model has already loaded; None = load it.
        trained: values of the norm's parameters, keyed by relative name, which replace those of the checkpoint.
    """

    def __init__(
        self, skeleton: Skeleton, weight: Tensor | None = None, trained: Mapping[str, TrainedVector] | None = None
    ) -> None:
        self._norm, loaded, self._bias = skeleton.final_parts()
        # `torch.equal` also accepts equal values of another dtype.
        is_same = weight is not None and weight.dtype == loaded.dtype and torch.equal(weight, loaded)
        self.weight = weight if weight is not None and is_same else loaded
        self._trained = trained or {}
        keys, config = skeleton.family.multipliers, skeleton.reader.config
        read = ConfigReader(config, skeleton.family.defaults, skeleton.family.keys)
        self._factor = read.number(keys.logits, default=1.0) / read.positive(keys.logits_divisor, default=1.0)
        self._softcap = read.optional_number(keys.logits_softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (R, V) float32 for hidden states (R, D) after the last layer."""
        values = {name: vector.value().to(hidden.dtype) for name, vector in self._trained.items()}
        normed = functional_call(self._norm, values, (hidden,))
        logits = nn.functional.linear(normed, self.weight, self._bias).float() * self._factor
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class Student:
    """The compressed model, with its codes in memory. *Mutable*: training changes the parameters.

    Args:
        source: the checkpoint.
        skeleton: the same checkpoint's model, whose reader gives dequantized values.
        head: weight (V, D) of the original's head, which is shared if the checkpoint has the same.
    Attributes:
        linears: scales of the quantized linears in the layers, keyed by full name in the model.
        vectors: the vectors in the layers, and those of the final norm, keyed by full name in the model.
    Raises:
        SchemeError: the model cannot be trained; the message says why.
    """

    def __init__(self, source: Source, skeleton: Skeleton, head: Tensor) -> None:
        reader = skeleton.reader
        assert isinstance(reader, ModelReader), "only its view knows the model's names"
        self._skeleton, device = skeleton, skeleton.device
        self.linears: dict[str, TrainedScales] = {}
        self.vectors: dict[str, TrainedVector] = {}
        # Names in files, keyed by names in the model.
        self._modules = {reader.own_name(f"{name}.weight").removesuffix(".weight"): name for name in source.linears}
        self._tensors = {reader.own_name(name): name for name in source.reader.names}
        self._layers = [self._layer(source, index) for index in range(skeleton.num_layers)]
        inside = tuple(f"{skeleton.layer_name(index)}." for index in range(skeleton.num_layers))
        if left := [name for name in self._modules if name.startswith(inside) and name not in self.linears]:
            raise SchemeError(
                f"{source.reader.path}: {self._modules[left[0]]} is stored in another form than the model's linear "
                "has, and distill cannot train such weights"
            )
        norm = skeleton.family.final_norm
        own = {
            name: TrainedVector(reader.tensor(full), device)
            for name in skeleton.norm_names()
            if (full := f"{norm}.{name}") in self._tensors
        }
        self.vectors |= {f"{norm}.{name}": vector for name, vector in own.items()}
        self.head = Head(skeleton, head, own)

    def trained(self, source: Source) -> Source:
        """Return the checkpoint with the present scales and vectors."""
        return replace(
            source,
            weights={self._modules[name]: linear.result() for name, linear in self.linears.items()},
            changed={self._tensors[name]: vector.result() for name, vector in self.vectors.items()},
        )

    def _layer(self, source: Source, index: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, TrainedVector]]:
        """Load a layer: the module without weights, its fixed tensors, and its vectors, keyed by relative name."""
        skeleton, prefix = self._skeleton, self._skeleton.layer_name(index)
        layer = skeleton.blank_layer(index)
        coded = {name for name, _ in layer.named_modules() if f"{prefix}.{name}" in self._modules}
        for name in sorted(coded):
            linear, full = layer.get_submodule(name), f"{prefix}.{name}"
            if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
                raise SchemeError(f"{full} is a {type(linear).__name__}; distill trains ordinary linears only")
            if skeleton.is_shared(index, name):
                raise SchemeError(f"several layers share {full}; distill cannot train such weights")
            weight = source.weight(self._modules[full])
            # Trained scales are rounded to the dtype that the format stores.
            weight = replace(weight, scale=storable(weight.scale, source.format))
            self.linears[full] = TrainedScales(weight, source.linears[self._modules[full]], skeleton.device)
            vars(linear)["forward"] = partial(self._multiply, full, linear)  # overrides the class's method
        fixed: dict[str, Tensor] = {}
        vectors: dict[str, TrainedVector] = {}
        for name, empty in skeleton.layer_tensors(index).items():
            owner, _, leaf = name.rpartition(".")
            if leaf == "weight" and owner in coded:
                continue
            full, is_parameter = f"{prefix}.{name}", isinstance(empty, nn.Parameter)
            value = skeleton.read_finite(full)
            if is_parameter and value.dim() == 1 and full in self._tensors:
                vectors[name] = self.vectors[full] = TrainedVector(value, skeleton.device)
            else:
                fixed[name] = value.to(skeleton.device, skeleton.dtype if is_parameter else empty.dtype)
        return layer, fixed, vectors

    def _multiply(self, full: str, linear: nn.Linear, inputs: Tensor) -> Tensor:
        """Return the output of a quantized linear; its inputs are quantized as at run time."""
        scales = self.linears[full]
        if (scheme := scales.scheme.activation) is not None:
            rounded = fake_quantize_inputs(inputs.detach(), scheme, scales.weight.input_scale)
            inputs = inputs + (rounded - inputs).detach()  # gradients pass through the rounding unchanged
        return scales.product(inputs, linear.bias)

    def _run(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output (B, T, D) of a layer."""
        layer, fixed, vectors = self._layers[index]
        values = fixed | {name: vector.value().to(self._skeleton.dtype) for name, vector in vectors.items()}
        # Copies, because autograd does not accept the inference-mode tensors of the skeleton.
        arguments = tree_map_only(Tensor, Tensor.clone, self._skeleton.arguments(index, hidden))
        return hidden_states(functional_call(layer, values, (hidden,), arguments))

    def parameters(self) -> dict[str, Tensor]:
        """Return all changes, keyed by the full name of the linear or the vector."""
        scales = {name: linear.change for name, linear in self.linears.items() if linear.change is not None}
        return scales | {name: vector.change for name, vector in self.vectors.items()}

    def kl(self, hidden: Tensor, target: Tensor, original: Head, *, train: bool = False) -> float:
        """Return the sum over all tokens of KL(original || compressed), in nats.

        Args:
            hidden: (B, T, D) hidden states before the first layer.
            target: (B, T, D) hidden states of the original after its last layer.
            original: the original's head.
            train: add the gradient of this sum to the gradient of every parameter. The sum's gradient keeps clear of
                both ends of float16's range; that of the mean would not.
        """
        states = [hidden.to(self._skeleton.device, copy=True)]  # see `_run`
        with torch.no_grad():
            for index in range(len(self._layers)):
                states.append(self._run(index, states[-1]))
        value, gradient = _divergence(self.head, states.pop(), original, target.to(self._skeleton.device), train)
        for index in reversed(range(len(self._layers) if train else 0)):
            inputs = states.pop().detach().requires_grad_(index > 0)
            with torch.enable_grad():
                self._run(index, inputs).backward(gradient)  # type: ignore[no-untyped-call]
            if inputs.grad is not None:
                gradient = inputs.grad
        return value


def _divergence(own: Head, hidden: Tensor, original: Head, target: Tensor, train: bool) -> tuple[float, Tensor]:
    """Return the sum of the KL divergences; if `train`, also its gradient by `hidden`. See `Student.kl`."""
    rows, targets = hidden.flatten(0, 1), target.flatten(0, 1)
    gradient, value = torch.zeros_like(rows), 0.0
    step = max(1, _LOGITS_BYTES // (4 * own.weight.shape[0]))
    for part in (slice(start, start + step) for start in range(0, len(rows), step)):
        with torch.no_grad():
            expected = log_softmax(original.logits(targets[part]), -1)
        with torch.enable_grad() if train else nullcontext():
            states = rows[part].detach().requires_grad_(train)
            total = kl_div(log_softmax(own.logits(states), -1), expected, reduction="sum", log_target=True)
        value += float(total.detach())
        if train:
            total.backward()  # type: ignore[no-untyped-call]
            assert states.grad is not None
            gradient[part] = states.grad
    return value, gradient.view_as(hidden)


class Embedder:
    """Hidden states before the first layer of a model, for the tokens of a text.

    Args:
        skeleton: the model.
        texts: token ids that will be embedded; only their rows of the embedding are read.
    """

    def __init__(self, skeleton: Skeleton, texts: Iterable[Tensor]) -> None:
        used = torch.cat([text.flatten() for text in texts]).unique()  # type: ignore[no-untyped-call]
        self._skeleton, name = skeleton, f"{skeleton.family.embedding}.weight"
        self._table = skeleton.reader.gather_rows(name, used)
        self._row_of = torch.zeros(skeleton.vocab_size, dtype=torch.int64)
        self._row_of[used] = torch.arange(len(used))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) of token ids (B, T)."""
        return self._skeleton.embed(token_ids, self._table, self._row_of)


@torch.no_grad()
def last_states(
    skeleton: Skeleton, texts: Sequence[Tensor], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Tensor]:
    """Return the hidden states (B, T, D) after the last layer, on the CPU; one layer is in memory at a time.

    Args:
        skeleton: the original model.
        texts: batches of token ids, (B, T) each.
        progress: called before each layer with its number and the number of layers.
    """
    embed = Embedder(skeleton, texts)
    states = [embed(ids) for ids in texts]
    for index in range(skeleton.num_layers):
        progress(index, skeleton.num_layers)
        layer: Any = skeleton.layer(index)
        for number, hidden in enumerate(states):
            outputs = layer(hidden.to(skeleton.device), **skeleton.arguments(index, hidden))
            states[number] = hidden_states(outputs).cpu()
    return states
