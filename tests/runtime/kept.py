"""What an engine with a budget should compute: dense attention of each step to what was kept before it, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.layouts import KVLayout, StateLayout
from quantkit.kernels.ops import Stepwise
from quantkit.models.kv_budget import SINK_TOKENS
from quantkit.runtime.cache.non_paged import StatePool
from quantkit.runtime.engine.engine import Engine
from tests.kernels.paged import remembered
from tests.runtime.helpers import make_batch

CPU = torch.device("cpu")


@dataclass
class Step:
    """One sequence's part of a step: where it begins, its tokens, what was evicted just before it, and its logits.

    `given_up` are slots, `evicted` those of each head by layer; `states` are its fresh keys and values by layer, as
    they came to the cache.
    """

    start: int
    tokens: list[int]
    given_up: range
    evicted: dict[int, Any]
    logits: Tensor
    states: dict[int, tuple[Tensor, Tensor]]


def without(states: Tensor, given_up: range, evicted: Any | None) -> tuple[Tensor, list[tuple[int, int]]]:
    """States (N, H, ...) of a layer after an eviction, and which slots of which heads others have moved to.

    What a head keeps of the slots that are given up takes, in order, the slots of what it evicted elsewhere.
    """
    states, filled = states.clone(), []
    for head, slots in enumerate([] if evicted is None else evicted.tolist()):
        holes, stay = [s for s in slots if s not in given_up], [s for s in given_up if s not in set(slots)]
        assert len(holes) == len(stay), "heads keep different numbers of tokens"
        states[holes, head] = states[stay, head]
        filled += [(hole, head) for hole in holes]
    return torch.cat([states[: given_up.start], states[given_up.stop :]]), filled


@dataclass
class Recorder:
    """Follows an engine from outside: every step of every sequence, and what eviction has left of it until then.

    `kept` are positions (N, H) by sequence and layer.
    """

    engine: Engine
    steps: dict[int, list[Step]] = field(default_factory=dict)
    kept: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._step, self.engine.runner.step = self.engine.runner.step, self.step
        self._watching = self.engine.runner.layer_by_layer()  # as long as this lives
        self._watching.__enter__()
        self._states: dict[int, tuple[Tensor, Tensor]] = {}
        self._evicted: dict[int, int] = {}
        for number, attention in self.engine.runner.cache.attention.items():
            attention.inner = self._watched(number, attention.inner)

    def _watched(self, number, inner):
        def attend(states, batch, options):
            self._states[number] = states[1].clone(), states[2].clone()
            return inner(states, batch, options)

        return attend

    def step(self, chunks, tokens=None):
        logits = self._step(chunks, tokens)
        at = begin = 0
        size = self.engine.config.page_size
        for holder, new, start, count in chunks:
            if start == 0:
                self.steps[holder.id], self._evicted[holder.id] = [], 0
                self.kept[holder.id] = {n: torch.zeros(0, key.shape[1]).long() for n, (key, _) in self._states.items()}
            first = -(-SINK_TOKENS // size) * size
            given_up = range(first, first + holder.num_evicted - self._evicted[holder.id])
            self._evicted[holder.id] = holder.num_evicted
            evicted = holder.evictions.get(start, {}) if given_up else {}
            rows = slice(begin, begin + len(new))
            states = {n: (key[rows], value[rows]) for n, (key, value) in self._states.items()}
            step = Step(start, list(new), given_up, evicted, logits[at : at + count].clone(), states)
            self.steps[holder.id].append(step)
            for n, kept in self.kept[holder.id].items():
                kept, _ = without(kept, given_up, evicted.get(n))
                assert len(kept) == start - holder.num_evicted
                new_ones = torch.arange(start, start + len(new))[:, None].expand(-1, kept.shape[1])
                self.kept[holder.id][n] = torch.cat([kept, new_ones])
            at, begin = at + count, begin + len(new)
        return logits


class DenseCache:
    """In place of a `KVCache`, of one sequence: all keys and values in a row, of which each head has what it kept.

    They are computed anew but kept as the engine had them: a last bit may decide to which code a number is rounded.
    """

    def __init__(self, layouts) -> None:
        self.worst = 0.0
        self.step: Step | None = None
        self.states = {n: StatePool(one.shape, 1, CPU) for n, one in enumerate(layouts) if isinstance(one, StateLayout)}
        self.attention = {
            n: Stepwise(_DenseAttention(self, n, layout))
            for n, layout in enumerate(layouts)
            if isinstance(layout, KVLayout)
        }

    def compare(self, actual: Tensor, expected: Tensor) -> None:
        if expected.numel():
            self.worst = max(self.worst, ((actual - expected).abs().max() / expected.abs().max()).item())


class _DenseAttention:
    """`past` are the keys and values of each head as the cache gives them back, and their positions (N, H)."""

    def __init__(self, cache: DenseCache, number: int, layout: KVLayout) -> None:
        self.cache, self.number, self.layout = cache, number, layout
        self.past: dict[str, Tensor] = {}

    def __call__(self, states, batch, options):
        step, positions = self.cache.step, batch.in_text()[0]
        if step.start == 0:
            self.past = {"key": states[1][:0], "at": torch.zeros(0, states[1].shape[1]).long()}
            if not self.layout.rope_dim:
                self.past["value"] = states[2][:0]
        for name in self.past:
            self._evict(name, step)
        at = torch.cat([self.past["at"], positions[:, None].expand(-1, states[1].shape[1])])
        seen = []
        for name, given, fresh in zip(("key", "value"), step.states[self.number], states[1:], strict=True):
            self.cache.compare(given, fresh)
            if name in self.past:
                old = self.past[name]
                self._store(name, given)
            else:  # of latent attention: channels of its keys
                old = old[..., self.layout.rope_dim :]
            seen.append(torch.cat([old, given]))
        self.past["at"] = at
        return _attend(states[0], *seen, positions, at, options)

    def _evict(self, name: str, step: Step) -> None:
        past, size = self.past[name], self.layout.page_size
        left, filled = without(past, step.given_up, step.evicted.get(self.number))
        if name == "key" and self.layout.has_residual:
            # Keys that share a scale: each page of a head that has changed is rounded once more.
            for index, head in {(slot // size, head) for slot, head in filled}:
                start = index * size - (len(step.given_up) if index * size >= step.given_up.stop else 0)
                page = left[start : start + size, head : head + 1]
                left[start : start + size, head : head + 1] = self._rounded(name, page)
        self.past[name] = left

    def _store(self, name: str, given: Tensor) -> None:
        """Keys that share a scale wait for their page to be complete, and values beside them."""
        past, size = self.past[name], self.layout.page_size
        waits = self.layout.has_residual if name == "key" else self.layout.has_value_residual
        border = len(past) // size * size if waits else len(past)
        self.past[name] = torch.cat([past[:border], self._rounded(name, torch.cat([past[border:], given]))])

    def _rounded(self, name: str, states: Tensor) -> Tensor:
        return remembered(self.layout, name, states, len(states))


def _attend(query, key, value, positions, key_positions, options) -> Tensor:
    """Attention (L, Hq, D) in float64 by positions in the text, (N, Hkv) of the keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    scores = torch.einsum("lhd,nhd->hln", query.double(), key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = positions[:, None] - key_positions.T.repeat_interleave(groups, 0)[:, None]  # (Hq, L, N)
    hidden = distance < 0 if options.window is None else (distance < 0) | (distance >= options.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks[:, None, None].expand(*scores.shape[:2], 1).double()], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hln,nhd->lhd", weights, value).to(query.dtype)


def worst_difference(engine: Engine, recorder: Recorder) -> float:
    """Largest difference from the reference of any logits, or of keys and values, relative to the largest of them."""
    worst = 0.0
    for number, steps in recorder.steps.items():
        cache = DenseCache(engine.runner.cache.layouts)
        for step in steps:
            cache.step = step
            rows = list(range(len(step.tokens) - len(step.logits), len(step.tokens)))
            pages = [list(range(-(-(step.start + len(step.tokens)) // 16)))]
            batch = make_batch([step.tokens], [step.start], pages, rows=rows)
            cache.compare(step.logits, engine.model.forward(batch, cache))
        worst = max(worst, cache.worst)
        assert cache.worst == cache.worst, f"sequence {number}: not a number"
    return worst
