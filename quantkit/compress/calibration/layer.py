"""One decoder layer under compression: its weights, the inputs it sees, and the codes chosen so far.

This is the only thing that algorithms know. Shapes: T tokens, N outputs, K inputs of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.memory import release_freed_memory
from quantkit.compress.calibration.activations import ActivationStore
from quantkit.compress.calibration.expert_inputs import (
    UNDER_CALIBRATED_TOKENS,
    describe_under_calibrated,
    probe,
    probe_until,
)
from quantkit.compress.calibration.observers import Observer, Sample
from quantkit.errors import CheckpointError, SchemeError
from quantkit.models.families import LinearSet, find_expert
from quantkit.numerics.affine import (
    from_codes,
    largest_magnitude,
    minmax_parameters,
    round_to_nearest,
    search_parameters,
    to_codes,
)
from quantkit.numerics.inputs import fake_quantize_inputs
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord

# Weights whose error is measured at once: its float32 copies must stay small beside the layer.
_ERROR_BLOCK = 1 << 21


@dataclass(kw_only=True, slots=True)
class LayerContext:
    """One decoder layer and everything an algorithm may ask of it. Modified by each step.

    Args:
        name: full module name, e.g. `model.layers.3`.
        block: the layer with its weights, in the compute dtype, on the compute device.
        sets: linears that share an input, in running order; those that are ignored included.
        schemes: scheme of each linear to quantize, by relative name.
        scale_dtype: dtype in which scales are stored, by relative name.
        head_dim: width of an attention head.
        store: hidden states before this layer, made by the layers before as they were quantized; None when the recipe
            needs no data.
        original_store: hidden states before this layer in the original model; only there when a step asks for them.
        original: the layer as it was, likewise.
        arguments: what the model calls the layer with, besides the hidden states.
        stored_dtype: dtype on disk of each parameter, by relative name.
        divisors: (K,) what the inputs of a set have been divided by since the layer was loaded, by its first linear.
        cache_scales: tensors of the KV cache to write beside the weights, by relative name.
        seed: of the run, for steps that draw random numbers.
        input_scales: (1,) calibrated scale of each linear's input, by relative name, once it is known; see
            `quantkit.compress.calibration.input_scales`.
        all_tokens: statistics of experts are of all tokens, not of those that are routed to them; what the layer
            computes is not affected.
        tokens_per_expert: how many tokens are routed to each; set by `count_tokens`.
    """

    name: str
    block: nn.Module
    sets: tuple[LinearSet, ...]
    schemes: Mapping[str, LinearScheme]
    scale_dtype: Mapping[str, torch.dtype]
    head_dim: int
    store: ActivationStore | None = None
    original_store: ActivationStore | None = None
    original: nn.Module | None = None
    arguments: Callable[[Tensor], dict[str, Any]] = lambda hidden: {}
    stored_dtype: Mapping[str, torch.dtype] = field(default_factory=dict)
    seed: int = 0
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedTensor] = field(default_factory=dict)
    ranges: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    divisors: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, LinearRecord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cache_scales: dict[str, Tensor] = field(default_factory=dict)
    _largest: dict[str, Tensor] = field(default_factory=dict)
    all_tokens: bool = True
    tokens_per_expert: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the weights and statistics of this layer live."""
        return next(self.block.parameters()).device

    def linear(self, name: str) -> nn.Linear:
        """The linear with this relative name."""
        module = self.block.get_submodule(name)
        assert isinstance(module, nn.Linear), f"{name} is not a linear"
        return module

    def weight(self, name: str) -> Tensor:
        """(N, K) weight of a linear, the layer's own: writing to it changes the layer."""
        return self.linear(name).weight.data

    def pending(self) -> list[tuple[LinearSet, tuple[str, ...]]]:
        """Sets that still have linears to quantize, each with those linears."""
        todo = [(group, tuple(n for n in group.linears if self._is_pending(n))) for group in self.sets]
        return [(group, names) for group, names in todo if names]

    def _is_pending(self, name: str) -> bool:
        return name in self.schemes and name not in self.quantized and not self._is_under_calibrated(name)

    def _is_under_calibrated(self, name: str) -> bool:
        """Whether a linear belongs to an expert that saw too little for any step to work on."""
        place = find_expert(name)
        if place is None or self.all_tokens or not self.tokens_per_expert:
            return False
        return self.tokens_per_expert[place.number] < UNDER_CALIBRATED_TOKENS

    def count_tokens(self) -> None:
        """Route all calibration data, count the tokens of each expert, and note those that are under-calibrated."""
        places = [place for group in self.sets for name in group.linears if (place := find_expert(name))]
        if not places or self.store is None:
            return
        counts = dict.fromkeys(sorted(place.number for place in places), 0)
        names = {f"{places[0].container}.{number}": number for number in counts}

        def look(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            counts[names[name]] += args[0].reshape(-1, args[0].shape[-1]).shape[0]

        for hidden in self._hidden_states():
            probe_until(self.block, list(names), places[0].owner, look, partial(self.forward, hidden))
        self.tokens_per_expert = tuple(counts.values())
        self.notes += describe_under_calibrated(counts, self.all_tokens)

    def observe(self, observers: Mapping[str, Observer]) -> None:
        """Run all calibration data through the layer and show each observer the inputs of its linear.

        Args:
            observers: by relative name of a linear. Rows for error measurements are kept on the way.
        """
        samples = {name: Sample() for name in observers}

        def look(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = args[0].reshape(-1, args[0].shape[-1])
            observers[name].update(inputs)
            samples[name].update(inputs)

        for hidden in self._hidden_states():
            probe(self.block, tuple(observers), look, partial(self.forward, hidden), all_tokens=self.all_tokens)
        release_freed_memory()
        for name, sample in samples.items():
            if not torch.isfinite(sample.rows).all():
                raise CheckpointError(f"{self.name}: the input of {name} is not finite; the model's weights are broken")
            self.samples[self._set_key(name)] = sample.rows

    def capture(self, module: str, max_tokens: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments of a sub-module's calls, whole sequences, for about `max_tokens` tokens.

        Args:
            module: relative name.
            max_tokens: batches are taken, and the last one cut between sequences, until there are this many.
        Returns:
            (args, kwargs) per batch, hidden states detached from further changes.
        """
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        left = max_tokens

        def keep(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        for hidden in self._hidden_states():
            if left <= 0:
                break
            kept = hidden[: max(1, left // hidden.shape[1])]
            probe(self.block, (module,), keep, partial(self.forward, kept), all_tokens=self.all_tokens)
            left -= kept.shape[0] * kept.shape[1]
        return calls

    def forward(self, hidden: Tensor, **more: Any) -> Tensor:
        """Output of the layer with its present weights; inputs of committed linears are quantized if the scheme says.

        Args:
            hidden: (B, T, D), any device.
            more: arguments for the layer besides those that the model gives it.
        Returns:
            (B, T, D) on the layer's device.
        """
        hidden = hidden.to(self.device)
        with torch.inference_mode(), self._quantized_inputs():
            output: Tensor | tuple[Tensor, ...] = self.block(hidden, **{**self.arguments(hidden), **more})
        return output[0] if isinstance(output, tuple) else output

    def original_forward(self, hidden: Tensor) -> Tensor:
        """Output of the original layer, for hidden states (B, T, D) of the original model."""
        assert self.original is not None, "no step of the recipe has asked for the original layer"
        hidden = hidden.to(self.device)
        with torch.inference_mode():
            output: Tensor | tuple[Tensor, ...] = self.original(hidden, **self.arguments(hidden))
        return output[0] if isinstance(output, tuple) else output

    def commit(self, name: str, weight: QuantizedTensor) -> None:
        """Set the codes of a linear, record their error, and put the decoded values into the layer.

        Args:
            name: relative name.
            weight: codes and scales; from here on the layer computes with their decoded values.
        """
        current, scheme = self.weight(name), self.schemes[name]
        if not torch.isfinite(weight.scale.float()).all():
            raise SchemeError(
                f"{self.name}.{name}: a scale is not finite in {str(weight.scale.dtype).removeprefix('torch.')}; "
                "the weights are broken, or too large for scales of this dtype: set format=compressed-tensors"
            )
        largest = self.tensor_largest(name)
        if largest is not None:
            self._largest[self._mates(name)[0]] = largest
        decoded = weight.dequantize(weight.values_dtype)  # as a loader in the model's dtype computes them
        sample = self.samples.get(self._set_key(name))
        self.records[name] = LinearRecord(
            name=name,
            scheme=scheme.describe(),
            shape=weight.shape,
            bits_per_weight=8 * weight.stored_bytes / current.numel(),
            rounding_error=relative_error(current, self._plain(name, largest), sample),
            error=relative_error(current, decoded, sample),
            measure="weight" if sample is None else "output",
        )
        self.quantized[name] = weight
        current.copy_(decoded)

    def _plain(self, name: str, largest: Tensor | None) -> Callable[[slice], Tensor]:
        """Rows of a linear, plainly rounded before any scale was folded into its columns, then folded likewise."""
        current, scheme = self.weight(name), self.schemes[name].weight
        divisor = self.divisors.get(self._set_key(name))
        before = current if divisor is None else current / divisor
        if divisor is not None and largest is not None:
            largest = largest_magnitude(before)
        scale, zero = minmax_parameters(before, scheme, self.scale_dtype[name], largest)

        def rounded(rows: slice) -> Tensor:
            groups = before[rows].float().view(-1, scale.shape[1], before.shape[1] // scale.shape[1])
            step, offset = scale[rows].unsqueeze(-1), None if zero is None else zero[rows].unsqueeze(-1)
            values = from_codes(to_codes(groups, step, offset, scheme.dtype), step, offset).view(-1, before.shape[1])
            return values if divisor is None else values * divisor

        return rounded

    def finish(self) -> None:
        """Round what no step has quantized to nearest: in the ranges a step has left, else the best found."""
        for group in self.sets:
            for name in (n for n in group.linears if n in self.schemes and n not in self.quantized):
                weight, scheme, dtype = self.weight(name), self.schemes[name].weight, self.scale_dtype[name]
                largest = self.tensor_largest(name)
                found = self.ranges.get(name) or search_parameters(weight, scheme, dtype, tensor_largest=largest)
                self.commit(name, round_to_nearest(weight, scheme, *found, dtype, largest))

    def tensor_largest(self, name: str) -> Tensor | None:
        """(1,) the largest magnitude of all that shares a scale of the whole tensor with this linear, if it has one.

        Those are the linears of its set and module with the same numbers, which engines fuse; once one of them has
        codes, it stays what it was then.
        """
        scheme = self.schemes[name].weight
        if not scheme.has_tensor_scale:
            return None
        known = self._largest.get(self._mates(name)[0])
        if known is not None:
            return known
        return torch.cat([largest_magnitude(self.weight(mate)) for mate in self._mates(name)]).amax().reshape(1)

    def _mates(self, name: str) -> list[str]:
        """Linears that share tensor-wide scales with this one, itself included."""
        module = name.rpartition(".")[0]
        group = next(group for group in self.sets if name in group.linears)
        return [
            other
            for other in group.linears
            if other.rpartition(".")[0] == module
            and other in self.schemes
            and self.schemes[other].weight == self.schemes[name].weight
        ]

    def rescale_sample(self, group: LinearSet, scales: Tensor) -> None:
        """Keep the rows for error measurements in step with inputs that are now divided by `scales` (K,)."""
        self.divisors[group.linears[0]] = self.divisors.get(group.linears[0], 1.0) * scales
        if group.linears[0] in self.samples:
            self.samples[group.linears[0]] /= scales

    def _set_key(self, name: str) -> str:
        return next(group.linears[0] for group in self.sets if name in group.linears)

    def _hidden_states(self) -> Iterator[Tensor]:
        assert self.store is not None, "this recipe has no calibration data"
        return iter(self.store)

    @contextmanager
    def _quantized_inputs(self) -> Iterator[None]:
        """While open, committed linears see their inputs as the runtime will quantize them.

        Inputs with a calibrated scale are left as they are until it is known, which is when all linears have codes.
        """
        handles = []
        for name in self.quantized:
            scheme, scale = self.schemes[name].activation, self.input_scales.get(name)
            if scheme is not None and (scale is not None or not scheme.is_calibrated):
                handles.append(
                    self.linear(name).register_forward_pre_hook(
                        lambda module, args, scheme=scheme, scale=scale: (
                            fake_quantize_inputs(args[0], scheme, scale),
                            *args[1:],
                        )
                    )
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def relative_error(weight: Tensor, decoded: Tensor | Callable[[slice], Tensor], sample: Tensor | None) -> float:
    """||X (W - D)'|| / ||X W'||, or ||W - D|| / ||W|| without inputs; a block of rows at a time.

    Args:
        weight: (N, K).
        decoded: (N, K), or a function that makes these rows of it.
        sample: (T, K) float32 inputs, or None.
    """
    wrong = total = 0.0
    step = max(1, _ERROR_BLOCK // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        values, reference = decoded(rows) if callable(decoded) else decoded[rows], weight[rows].float()
        difference = values.float() - reference
        if sample is not None:
            difference, reference = sample @ difference.T, sample @ reference.T
        wrong += difference.square().sum().item()
        total += reference.square().sum().item()
    return math.sqrt(wrong / total) if total > 0 else 0.0


def signal_to_noise_db(reference: Tensor, output: Tensor) -> float:
    """10 log10 of signal over noise power; capped at 200 dB when there is no noise.

    Raises:
        CheckpointError: the output is not finite.
    """
    if not torch.isfinite(output).all():
        raise CheckpointError("a layer's output is not finite: its weights are broken, or float16 has overflowed")
    signal = reference.float().square().sum().item()
    noise = (output.float() - reference.float()).square().sum().item()
    return min(200.0, 10 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0
