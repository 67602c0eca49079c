"""Find the structure of a decoder layer by running it: sets of linears, the sources that can absorb their smoothing
scales, and their parents.

The layer is an ordinary torch module with its own or random weights. No family description is used.
A source is found by trial: scales are folded into a candidate and the set, and the layer's output must not change.
Scales are random powers of two. Multiplying by them is exact, so a correct fold changes only the order of sums, and a
wrong fold changes the output. Every fold is tried with the layer's own weights and with larger weights. With larger
weights, values reach any clamp between the source and the set, so a fold across a clamp changes the output.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantkit.compress.calibration.folding import folded
from quantkit.compress.discovery.input_sets import (
    Draft,
    Gates,
    Recording,
    draft_sets,
    expert,
    record_inputs,
    same,
    template,
)
from quantkit.compress.discovery.layout import module_ancestors
from quantkit.errors import ModelError
from quantkit.models.linear_sets import LinearSet, common_owner

# Usual names of linears that engines fuse. Linears whose names have the same value are fused.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "up"),
}
# Largest relative change of an output that counts as unchanged: a correct fold changes only the order of sums.
TOLERANCE = 1e-6
_GAINS = (1.0, 64.0)
_MOST_CANDIDATES = 6
_LARGEST_EXPONENT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Structure found in one layer.

    Args:
        sets: linears that read the same tensor, in execution order, with the sources that passed the trial.
        ignored: linears that must stay unquantized, and why.
        pairs: number of smoothing pairs that were tried: one per set that has a candidate for its source. Sets of the
            same linears in different experts count as one.
        dropped: for each pair that failed, a phrase that says why.
        touches_weights: whether the layer's own code reads weights of linears.
    """

    sets: tuple[LinearSet, ...]
    ignored: dict[str, str]
    pairs: int
    dropped: tuple[str, ...]
    touches_weights: bool = False


@dataclass(kw_only=True, slots=True)
class FoldTrial:
    """A layer on which folds of smoothing scales are tried; it is modified during a trial and restored afterwards.

    Args:
        block: the layer, with float32 weights.
        run: calls the layer once and returns every tensor that it passes on.
        head_dim: width of an attention head.
        expected: outputs without a fold, keyed by the gain of the weights; computed in the first trial.
    """

    block: nn.Module
    run: Callable[[], Sequence[Tensor]]
    head_dim: int
    expected: dict[float, list[Tensor]] = field(default_factory=dict)

    def change(self, groups: Sequence[LinearSet]) -> float:
        """Return the largest relative change of the layer's output when scales are folded into all `groups` at once.

        Args:
            groups: sets of linears, with the sources to test.
        Raises:
            ModelError: the layer's output is not finite, neither with its own weights nor with larger ones.
        """
        self._expect()
        values = dict(_fold(self.block, groups, self.head_dim))
        worst = 0.0
        for gain, expected in self.expected.items():
            with _changed(self.block, values, gain):
                worst = max(worst, *(_distance(a, b) for a, b in zip(self.run(), expected, strict=True)))
        return worst

    def _expect(self) -> None:
        for gain in _GAINS if not self.expected else ():
            with _changed(self.block, {}, gain):
                outputs = [tensor.clone() for tensor in self.run()]
            # If the layer overflows with one gain, the other gain decides.
            if all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
                self.expected[gain] = outputs
        if not self.expected:
            raise ModelError("a decoder layer with random weights computes values that are not finite")


def survey(
    block: nn.Module, run: Callable[[], Sequence[Tensor]], hidden: Tensor, *, head_dim: int, gates: Gates
) -> Survey:
    """Find the sets of linears in a layer, and test which modules can absorb the sets' smoothing scales.

    Args:
        block: the layer with float32 weights; modified during the call and then restored.
        run: calls the layer once and returns every tensor that it passes on.
        hidden: tensor with the shape (B, T, D) of the hidden states; its values are not used.
        head_dim: width of an attention head.
        gates: rule that recognizes gates and routers by their number of outputs.
    Raises:
        ModelError: the layer's output is not finite.
    """
    seen = record_inputs(block, run)
    drafts, alone = draft_sets(block, seen, gates)
    trial = FoldTrial(block=block, run=run, head_dim=head_dim)
    sets: list[tuple[int, LinearSet]] = []
    dropped: list[str] = []
    pairs = 0
    for alike in _by_key(drafts):
        plain = [_plain(block, seen, draft, alike[0], hidden) for draft in alike]
        options = [_with_source(plain, *option) for option in source_candidates(block, seen, alike[0], head_dim)]
        groups, failure = _choose(trial, [option for option in options if option])
        pairs += bool(groups or failure)
        dropped += [failure] if failure else []
        sets += [(draft.order, group) for draft, group in zip(alike, groups or plain, strict=True)]
    ordered = tuple(group for _, group in sorted(sets, key=lambda item: item[0]))
    return Survey(sets=ordered, ignored=alone, pairs=pairs, dropped=tuple(dropped))


def survey_modules(block: nn.Module, gates: Gates) -> Survey:
    """Derive the structure of a layer that cannot run by itself from the names and shapes of its modules. The sets have
    no source, so they cannot be smoothed.

    Args:
        block: the layer, with or without weights.
        gates: rule that recognizes gates and routers by their number of outputs.
    """
    rows = {name: module.weight.shape[0] for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    limits = {name: n for name, n in rows.items() if n <= gates.most or n in gates.experts}
    small = {name: f"a gate or router (number of outputs: {n})" for name, n in limits.items()}
    together: dict[tuple[str, str], list[str]] = {}
    for name in (name for name in rows if name not in small):
        owner, _, leaf = name.rpartition(".")
        together.setdefault((owner, _FUSED.get(leaf, leaf)), []).append(name)
    sets = (LinearSet(linears=tuple(names), source=None, parent="") for names in together.values())
    return Survey(sets=tuple(sets), ignored=small, pairs=0, dropped=())


def _by_key(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Group the sets that consist of the same linears in different experts; every other set forms its own group."""
    alike: dict[tuple[str, ...], list[Draft]] = {}
    for draft in drafts:
        alike.setdefault(draft.key, []).append(draft)
    return list(alike.values())


def _plain(block: nn.Module, seen: Recording, draft: Draft, first: Draft, hidden: Tensor) -> LinearSet:
    """Return the set of a draft, without a source. `first` is the draft of the same linears in an expert that was
    called.
    """
    parent = _same_expert(_parent(seen, first.linears, hidden), first.linears[0], draft.linears[0])
    return LinearSet(linears=tuple(draft.linears), source=None, parent=parent, beside=tuple(draft.beside))


def _with_source(plain: Sequence[LinearSet], source: str, grouped: bool) -> list[LinearSet]:
    """Return the sets `plain`, each with its own source. If two sets would have the same source, return none, because a
    source can absorb the scales of only one set.
    """
    first = plain[0].linears[0]
    sources = [_same_expert(source, first, group.linears[0]) for group in plain]
    if len(set(sources)) < len(sources):
        return []
    return [replace(group, source=name, grouped_heads=grouped) for group, name in zip(plain, sources, strict=True)]


def _choose(trial: FoldTrial, options: Sequence[list[LinearSet]]) -> tuple[list[LinearSet], str]:
    """Return the first option that does not change the layer's output, and an empty text. If every option changes the
    output, return no sets, and a text that says how much the first option, the likeliest, changes it.
    """
    failure = ""
    for option in options:
        change = trial.change(option)
        if change <= TOLERANCE:
            return option, ""
        source, linear = option[0].source or "", option[0].linears[0]
        pair = f"{template(source)} -> {template(linear)}"
        failure = failure or f"{pair} would change the layer's output by {100 * change:.3g} %"
    return [], failure


def _parent(seen: Recording, linears: Sequence[str], hidden: Tensor) -> str:
    """Return the smallest module that contains the linears and returns hidden states. If no module does, return the
    linear if there is only one; otherwise return "", the layer.
    """
    owner = common_owner(linears)
    own = seen.modules[linears[0]].output
    alone = len(linears) == 1
    if alone and expert(linears[0]) != linears[0] and own is not None and own.shape[-1] == hidden.shape[-1]:
        return linears[0]  # one expert's share of the hidden states
    if alone and _is_hidden(own, hidden):
        around = seen.modules[owner].output if owner in seen.modules else None
        if not owner or same(own, around):
            return linears[0]
    for name in (owner, *module_ancestors(owner)):
        if name in seen.modules and _is_hidden(seen.modules[name].output, hidden):
            return name
    return linears[0] if alone else ""


def _is_hidden(output: Tensor | None, hidden: Tensor) -> bool:
    return output is not None and output.shape[-1:] == hidden.shape[-1:] and output.numel() == hidden.numel()


def _same_expert(name: str, first: str, other: str) -> str:
    """If `name` lies in the expert that the linear `first` belongs to, return the same name in the expert of the linear
    `other`; otherwise return `name` unchanged.
    """
    return expert(other) + name.removeprefix(expert(first)) if name.startswith(expert(first)) else name


def source_candidates(block: nn.Module, seen: Recording, draft: Draft, head_dim: int) -> list[tuple[str, bool]]:
    """Return the modules that may have computed the input of a set of linears, the likeliest first.

    Args:
        block: the layer.
        seen: record of one run of its modules.
        draft: the set.
        head_dim: width of an attention head.
    Returns:
        For each module, its relative name, and whether its outputs are value heads that several query heads share.
    """
    width = block.get_parameter(f"{draft.linears[0]}.weight").shape[1]
    producers: list[tuple[str, bool]] = []
    others: list[tuple[str, bool]] = []
    linears = [what.order for name, what in seen.modules.items() if isinstance(block.get_submodule(name), nn.Linear)]
    for name, what in sorted(seen.modules.items(), key=lambda item: item[1].order, reverse=True):
        if what.order >= draft.order or name in draft.linears:
            continue
        parameters = dict(block.get_submodule(name).named_parameters(recurse=False))
        weight = parameters.get("weight")
        # A fold divides every parameter of the source by output, so each must have one entry per output.
        if weight is None or any(p.dim() == 0 or p.shape[0] != weight.shape[0] for p in parameters.values()):
            continue
        outputs = weight.shape[0]
        if weight.dim() == 1 and outputs == width:
            if same(what.output, draft.rows):
                producers.append((name, False))
            # A linear in between would mix the channels that this module scales.
            elif not any(what.order < order < draft.order for order in linears):
                others.append((name, False))  # a computation without weights lies between the module and the set
        elif weight.dim() == 2 and isinstance(block.get_submodule(name), nn.Linear):
            if outputs == width:
                # With as many value heads as query heads, each channel has its own scale, so sharing does not matter.
                others.append((name, False))
            elif width % outputs == 0 and outputs % head_dim == 0:
                others.append((name, True))
    return (producers + others)[:_MOST_CANDIDATES]


def _fold(block: nn.Module, groups: Sequence[LinearSet], head_dim: int) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        width = block.get_parameter(f"{group.linears[0]}.weight").shape[1]
        outputs = block.get_parameter(f"{group.source}.weight").shape[0]
        # The scales of a pair are the same in every process.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{group.source} {group.linears[0]}".encode()))
        exponents = torch.randint(-_LARGEST_EXPONENT, _LARGEST_EXPONENT + 1, (outputs,), generator=generator)
        scales = torch.exp2(exponents.float())
        if outputs != width:
            heads = scales.view(-1, 1, head_dim)
            scales = heads.expand(-1, width // outputs, -1).reshape(-1)
        yield from folded(block, group, scales, head_dim)


def _distance(output: Tensor, expected: Tensor) -> float:
    if output.shape != expected.shape:
        return float("inf")
    size: float = expected.double().norm().item()
    wrong: float = (output.double() - expected.double()).norm().item()
    return wrong / size if size > 0 else wrong


@contextmanager
def _changed(block: nn.Module, values: dict[str, Tensor], gain: float) -> Iterator[None]:
    """While open, set the parameters named in `values`, and multiply the weights of all linears by `gain`.

    Nothing is copied. Afterwards, everything is restored, exactly if `gain` is a power of two.
    """
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    kept = {name: block.get_parameter(name).data for name in values}
    try:
        for name, value in values.items():
            block.get_parameter(name).data = value
        for linear in linears:
            linear.weight.data.mul_(gain)
        yield
    finally:
        for linear in linears:
            linear.weight.data.div_(gain)
        for name, value in kept.items():
            block.get_parameter(name).data = value
