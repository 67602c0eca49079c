"""One decoder layer during compression: its weights, its inputs, and the codes chosen so far.

Algorithms see no other part of the model. Shapes: T tokens, N outputs, K inputs of a linear.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quantkit.compress.calibration.errors import measured, row_blocks, signal_to_noise_db
from quantkit.compress.calibration.expert_inputs import (
    UNDER_CALIBRATED_TOKENS,
    count_tokens,
    describe_under_calibrated,
    probe,
    token_rows,
)
from quantkit.compress.calibration.folding import output_divisor
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.layer_data import LayerChoices, LayerData
from quantkit.compress.calibration.observers import CrossGram, Deliveries, Gram, Observer, options_of, own_turns
from quantkit.compress.calibration.stream import NOTHING, Stream, learn_structure
from quantkit.distributed import broadcast, gather, share_out, world
from quantkit.huggingface.layer_call import Batch
from quantkit.machine.memory import release_freed_memory
from quantkit.models.linear_sets import LinearSet, find_expert
from quantkit.numerics import affine
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.affine import WeightGrid
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord

# With less than this signal-to-noise ratio, a repeated run counts as different; rounding alone leaves far less noise.
_SAME_DB = 20.0
_NO_ERRORS: Mapping[str, CrossGram] = MappingProxyType({})

T = TypeVar("T")
Seen = TypeVar("Seen", bound=Observer)
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module's call."""


@dataclass(kw_only=True, slots=True)
class LayerContext:
    """One decoder layer, as algorithms see it. Each step modifies it.

    Args:
        name: full module name, e.g. `model.layers.3`.
        stream: the layer with its weights, in the compute dtype on the compute device, and its inputs.
        sets: sets of linears that share an input, in execution order; ignored linears are included.
        schemes: scheme of each linear to quantize, by relative name.
        scale_dtype: dtype in which scales are stored, by relative name.
        head_dim: width of an attention head.
        stored_dtype: dtype on disk of each parameter, by relative name.
        seed: seed of the run, for steps that draw random numbers.
        owners: with several processes, the process that keeps a set's statistics, keyed by the set's first linear.
        data: data about the layer's inputs, and the original layer.
        chosen: choices made so far.
        shared: statistics of the unchanged layer, shared with other recipes whose layer has the same inputs; None = not
            shared.
    """

    name: str
    stream: Stream
    sets: tuple[LinearSet, ...]
    schemes: Mapping[str, LinearScheme]
    scale_dtype: Mapping[str, torch.dtype]
    head_dim: int
    stored_dtype: Mapping[str, torch.dtype] = field(default_factory=dict)
    seed: int = 0
    owners: Mapping[str, int] = field(default_factory=dict)
    data: LayerData = field(default_factory=LayerData)
    chosen: LayerChoices = field(default_factory=LayerChoices)
    shared: dict[Hashable, Any] | None = None

    @property
    def block(self) -> nn.Module:
        """The layer itself."""
        return self.stream.block

    @property
    def device(self) -> torch.device:
        """Device of this layer's weights and statistics."""
        return self.stream.device

    @property
    def store(self) -> ActivationStore:
        """Inputs of the layer, including the batches of other processes."""
        assert self.stream.store is not None, "this recipe has no calibration data"
        return self.stream.store

    def linear(self, name: str) -> nn.Linear:
        """Return the linear with this relative name."""
        module = self.block.get_submodule(name)
        assert isinstance(module, nn.Linear), f"{name} is not a linear"
        return module

    def weight(self, name: str) -> Tensor:
        """Return the (N, K) weight of a linear; writing to it changes the layer."""
        return self.linear(name).weight.data

    def pending(self) -> list[tuple[LinearSet, tuple[str, ...]]]:
        """Return each set that still has linears for steps to quantize, with the names of these linears."""
        left = {n for n in self.schemes if n not in self.chosen.quantized and not self._is_under_calibrated(n)}
        todo = [(group, tuple(n for n in group.linears if n in left)) for group in self.sets]
        return [(group, names) for group, names in todo if names]

    def _is_under_calibrated(self, name: str) -> bool:
        """Whether no step quantizes a linear because the linear belongs to an expert that saw too few tokens."""
        expert = find_expert(name)
        if expert is None or self.data.all_tokens or not self.data.tokens_per_expert:
            return False
        return self.data.tokens_per_expert[expert.number] < UNDER_CALIBRATED_TOKENS

    def count_tokens(self) -> None:
        """Run all calibration data through the layer, count the tokens routed to each expert, and add a note if experts
        are under-calibrated.
        """
        experts = [expert for group in self.sets for name in group.linears if (expert := find_expert(name))]
        if not experts or self.stream.store is None:
            return

        def count() -> dict[int, int]:
            runs = (partial(self.forward, self.store[batch]) for batch in self.store.own)
            own = count_tokens(self.block, experts, runs)
            return {number: sum(part[number] for part in gather(own)) for number in own}

        counts = self._gathered("tokens", count)
        self.data.tokens_per_expert = tuple(counts.values())
        self.chosen.notes += describe_under_calibrated(counts, self.data.all_tokens)

    def _gathered(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the statistics that `compute` returns. As long as the layer is unchanged, recipes that have `shared`
        in common compute the statistics only once for each key.
        """
        if self.shared is None or self.chosen.quantized or self.data.divisors:
            return compute()
        if key not in self.shared:
            self.shared[key] = compute()
        value: T = copy.deepcopy(self.shared[key])  # a copy, because the caller modifies it
        return value

    def observe(self, observers: Mapping[str, Seen], errors: Mapping[str, CrossGram] = _NO_ERRORS) -> dict[str, Seen]:
        """Run all calibration data through the layer and show each observer the inputs of its linear.

        With several processes, only the process that owns a set shows inputs to the set's observer; see `known`. A
        `Gram` that is split gets all inputs in every process.

        Args:
            observers: observers, keyed by the linear's relative name.
            errors: further observers for some of these linears. Each gets the linear's inputs together with the
                original model's inputs of the same tokens. The original inputs are divided by the scales that steps
                have folded into the set's source.
        Returns:
            The observers, or copies of other observers that have seen the same inputs.
        """

        def run() -> dict[str, Seen]:
            self._show(observers, errors)
            return dict(observers)

        return run() if errors else self._gathered(options_of(observers), run)

    def _show(self, observers: Mapping[str, Observer], errors: Mapping[str, CrossGram]) -> None:
        inputs: dict[str, Tensor] = {}

        def update(name: str, rows: Tensor) -> None:
            observers[name].update(rows)
            if name in errors:
                inputs[name] = rows

        def compare(name: str, rows: Tensor) -> None:
            divisor = self.data.divisors.get(self.set_key(name))
            errors[name].update(inputs.pop(name), rows if divisor is None else rows / divisor)

        def recipients(name: str) -> Iterable[int]:
            observer = observers[name]
            return range(world()) if isinstance(observer, Gram) and observer.is_split else (self.owner(name),)

        rows = Deliveries({"input": update, "original": compare}, recipients, self.device)
        self._run_batches(rows, observers, errors)

    def _run_batches(self, rows: Deliveries, observed: Collection[str], compared: Collection[str]) -> None:
        changing = {name for name in self.schemes if name not in self.chosen.quantized}
        seen = {name for first in observed for name in self._set(first).linears}
        # If no linear has codes yet, or all have, no later run would use what this run could store.
        if self.stream.structure is None and (compared or 0 < len(changing) < len(self.schemes)):
            self._learn_structure()
        original = self.data.original

        def send(kind: str, name: str, args: tuple[Any, ...], _: dict[str, Any]) -> None:
            rows.send(kind, name, token_rows(args))

        for number in own_turns(self.store):
            if number is not None:
                run, needed = partial(self.forward, self.store[number]), seen | changing
                shown, send_inputs = tuple(observed), partial(send, "input")
                self.stream.run(number, run, shown, send_inputs, changing, needed, all_tokens=self.data.all_tokens)
                # Run both models in turns, so that only one batch of inputs is held.
                if original is not None and original.store is not None and compared:
                    run = partial(original.forward, original.store[number])
                    original.run(number, run, tuple(compared), partial(send, "original"), (), changing - seen)
            rows.deliver()
        if original is not None:
            original.drop_complete()
        release_freed_memory()

    def _learn_structure(self) -> None:
        first = self.store[0]
        if isinstance(first, Tensor):
            self.stream.structure = learn_structure(self.block, self.schemes, partial(self.forward, first[:1]))
        else:  # a `LayerCall`: modules inside the layer may pass tensors to later layers, so none may be skipped
            self.stream.structure = NOTHING
            self.chosen.notes.append("passes on more than hidden states, so all modules ran for each set of linears")
        if self.data.original is not None:
            self.data.original.structure = self.stream.structure

    def capture(self, module: str, max_tokens: int) -> list[Call]:
        """Run whole sequences of about `max_tokens` tokens in all, and return the arguments of a sub-module's calls.

        Args:
            module: relative name of the sub-module.
            max_tokens: number of tokens; the last batch is cut between sequences.
        Returns:
            (args, kwargs) for each batch; later changes of the layer do not affect them.
        """
        calls: list[Call] = []
        left = max_tokens
        for hidden in self.store:
            if left <= 0:
                break
            kept = hidden[: max(1, left // hidden.shape[1])]
            run = partial(self.forward, kept)
            probe(self.block, (module,), lambda _, *call: calls.append(call), run, all_tokens=self.data.all_tokens)
            left -= kept.shape[0] * kept.shape[1]
        return calls

    def forward(self, hidden: Batch, **extra: Any) -> Tensor:
        """Return the layer's output with its current weights; inputs of quantized linears are quantized if their
        schemes say so.

        Args:
            hidden: (B, T, D) or a `LayerCall`, on any device.
            extra: additional arguments of the layer.
        Returns:
            (B, T, D) on the layer's device.
        """
        with self.quantized_inputs(self.chosen.quantized):
            return self.stream.forward(hidden, **extra)

    def advance(self, number: int, batch: Batch) -> Batch:
        """Run the layer on batch `number` of its inputs, and return the corresponding input of the next layer."""
        with self.quantized_inputs(self.chosen.quantized):
            return self.stream.advance(number, batch)

    def check_runs(self, first: Tensor | None) -> None:
        """Check that another run gives the same output as `first`, the layer's output for the first sequence (None in
        processes without this sequence). If it does not, all processes discard stored results and add a note.
        """
        if self.stream.structure is None or not isinstance(self.store[0], Tensor):
            return
        same = True
        if first is not None:
            with self.stream.replaying(0):
                same = signal_to_noise_db(first, self.forward(self.store[0])[:1]) > _SAME_DB
        if not broadcast(same):
            self.stream.forget()
            self.chosen.notes.append("a second run gave different outputs, so its calibration inputs may be inexact")

    def grid(self, name: str) -> WeightGrid:
        """Return the grid that the weight of a linear is rounded to."""
        return WeightGrid(self.schemes[name].weight, self.scale_dtype[name], self._tensor_largest(name))

    def round(self, names: Sequence[str]) -> None:
        """Round linears to nearest, with the ranges that a step chose, or else with searched ranges."""

        def rounded(name: str) -> tuple[QuantizedTensor, LinearRecord]:
            weight, grid = self.weight(name), self.grid(name)
            ranges = self.chosen.ranges.get(name) or affine.search_parameters(weight, grid)
            made = affine.round_to_nearest(weight, grid, ranges)
            return made, measured(self, name, made)

        for name, (weight, record) in zip(names, self.by_owners(names, rounded), strict=True):
            self._put(name, weight, record)

    def round_plainly(self, name: str, weight: Tensor) -> None:
        """Replace the codes of a linear by those of `weight`, its unquantized weight (N, K), rounded to nearest in full
        ranges.
        """
        before = self.chosen.quantized.pop(name)
        self.weight(name).copy_(weight)
        self.chosen.ranges[name] = affine.minmax_parameters(weight, self.grid(name))
        self.round([name])
        self.chosen.quantized[name] = replace(self.chosen.quantized[name], input_scale=before.input_scale)

    def finish(self) -> None:
        """Round the linears that no step has quantized."""
        names = [name for group in self.sets for name in group.linears if name in self.schemes]
        self.round([name for name in names if name not in self.chosen.quantized])

    def commit(self, weights: Mapping[str, QuantizedTensor]) -> None:
        """Set the codes of linears, record their errors, and put the decoded values into the layer.

        Args:
            weights: codes and scales, keyed by relative name; from then on the layer computes with the decoded values.
        """
        self.chosen.solved |= weights.keys()
        records = self.by_owners(list(weights), lambda name: measured(self, name, weights[name]))
        for (name, weight), record in zip(weights.items(), records, strict=True):
            self._put(name, weight, record)

    def owner(self, name: str) -> int:
        """Return the process that keeps the statistics of a linear's set."""
        return self.owners.get(self.set_key(name), 0)

    def by_owners(self, names: Sequence[str], compute: Callable[[str], T]) -> list[T]:
        """Compute a value for each linear in the process that owns its set, and return all values in every process."""
        if self.stream.store is None:  # one thread of one process does this work alone
            return [compute(name) for name in names]
        return share_out(names, compute, owners=[self.owner(name) for name in names])

    def known(self, observers: Mapping[str, T]) -> dict[str, T]:
        """Return all observers in every process: each observer comes from the process that owns the linear's set."""
        names = list(observers)
        return dict(zip(names, self.by_owners(names, observers.__getitem__), strict=True))

    def _put(self, name: str, weight: QuantizedTensor, record: LinearRecord) -> None:
        current, grid = self.weight(name), self.grid(name)
        # Fixed with the first codes: from then on, the layer holds decoded values, whose maximum may differ.
        if grid.tensor_largest is not None:
            self.chosen.tensor_largest[self.sharing(name)[0]] = grid.tensor_largest
        self.chosen.records[name], self.chosen.quantized[name] = record, weight
        for rows in row_blocks(*current.shape):
            current[rows] = weight.decoded(rows)  # from here on, the layer computes with what is written

    def _tensor_largest(self, name: str) -> Tensor | None:
        """Return the largest magnitude (1,) in the unquantized weights of this linear and of all linears that share a
        tensor-wide scale with it; None if the scheme has no such scale.
        """
        if not self.schemes[name].weight.has_tensor_scale:
            return None
        sharing = self.sharing(name)
        known = self.chosen.tensor_largest.get(sharing[0])
        if known is not None:
            return known
        return torch.cat([affine.largest_magnitude(self.weight(other)) for other in sharing]).amax().reshape(1)

    def sharing(self, name: str) -> list[str]:
        """Return this linear and the linears that share a tensor-wide scale with it. They have the same set, parent
        module and scheme, so engines fuse them.
        """
        module, scheme = name.rpartition(".")[0], self.schemes[name].weight
        inside = [other for other in self._set(name).linears if other.rpartition(".")[0] == module]
        return [other for other in inside if other in self.schemes and self.schemes[other].weight == scheme]

    def divide_inputs(self, group: LinearSet, scales: Tensor) -> None:
        """Record that the inputs of a set, and so the outputs of its source, are now divided by `scales` (K,)."""
        self.stream.forget()
        key, divisors, outputs = group.linears[0], self.data.divisors, self.data.output_divisors
        divisors[key] = divisors.get(key, 1.0) * scales
        if group.source is not None and group.source in self.schemes:
            rows = output_divisor(scales, len(self.weight(group.source)), self.head_dim)
            outputs[group.source] = outputs.get(group.source, 1.0) * rows

    def set_key(self, name: str) -> str:
        """Return the first linear of a linear's set, which is the key for the set's data."""
        return self._set(name).linears[0]

    def _set(self, name: str) -> LinearSet:
        return next(group for group in self.sets if name in group.linears)

    @contextmanager
    def quantized_inputs(
        self, names: Iterable[str], quantize: Callable[..., Tensor] = fake_quantize_inputs
    ) -> Iterator[None]:
        """While open, quantize the inputs of linears as the runtime will, if their schemes say so.

        Inputs with a calibrated scale stay unquantized until the scale is known, which is after all linears have codes.

        Args:
            names: relative names of the linears.
            quantize: function that quantizes inputs, with the arguments of `fake_quantize_inputs`.
        """
        with ExitStack() as hooks:
            for name in names:
                scheme, weight = self.schemes[name].activation, self.chosen.quantized.get(name)
                scale = None if weight is None else weight.input_scale
                if scheme is not None and (scale is not None or not scheme.is_calibrated):
                    change = partial(quantize, scheme=scheme, scale=scale)
                    hook = partial(lambda change, _, args: (change(args[0]), *args[1:]), change)
                    hooks.enter_context(self.linear(name).register_forward_pre_hook(hook))
            yield
