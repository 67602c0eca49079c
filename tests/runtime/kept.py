"""What an engine with a budget should compute: dense attention of each step to what was kept before it, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.kernels.layouts import KVLayout, StateLayout
from quantkit.kernels.ops.attention import Stepwise
from quantkit.runtime.cache.states import StatePool
from quantkit.runtime.engine.engine import Engine
from tests.kernels.paged import remembered
from tests.runtime.helpers import make_batch

CPU = torch.device("cpu")


@dataclass
class Step:
    """One sequence's part of a step: where it begins, its tokens, the positions kept before it, and its logits.

    `states` are its fresh keys and values by layer, as they came to the cache.
    """

    start: int
    tokens: list[int]
    kept: list[int]
    logits: Tensor
    states: dict[int, tuple[Tensor, Tensor]]


@dataclass
class Recorder:
    """Follows an engine from outside: every step of every sequence, and what eviction has left of it until then."""

    engine: Engine
    steps: dict[int, list[Step]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._step, self.engine.runner.step = self.engine.runner.step, self.step
        self._states: dict[int, tuple[Tensor, Tensor]] = {}
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
                self.steps[holder.id], self.kept[holder.id] = [], []
            gone = holder.evictions.get(start, ())
            kept = [position for index, position in enumerate(self.kept[holder.id]) if index // size not in gone]
            assert len(kept) == start - holder.num_evicted
            rows = slice(begin, begin + len(new))
            states = {n: (key[rows], value[rows]) for n, (key, value) in self._states.items()}
            self.steps[holder.id].append(Step(start, list(new), kept, logits.values[at : at + count].clone(), states))
            self.kept[holder.id] = kept + list(range(start, start + len(new)))
            at, begin = at + count, begin + len(new)
        return logits


class DenseCache:
    """In place of a `KVCache`, of one sequence: all keys and values in a row, of which a step sees what was kept.

    They are computed anew but kept as the engine had them: a last bit may decide to which code a number is rounded.
    """

    def __init__(self, layouts) -> None:
        self.worst = 0.0
        self.kept, self.given = torch.empty(0), {}
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
    def __init__(self, cache: DenseCache, number: int, layout: KVLayout) -> None:
        self.cache, self.number, self.layout = cache, number, layout
        self.past = [torch.empty(0), torch.empty(0)]

    def __call__(self, states, batch, options):
        kept, positions, seen = self.cache.kept, batch.in_text()[0], []
        for index, (name, fresh) in enumerate(zip(("key", "value"), states[1:], strict=True)):
            given = self.cache.given[self.number][index]
            self.cache.compare(given, fresh)
            past = torch.cat([self.past[index], given]) if int(positions[0]) else given
            old = past[kept]
            # Values of latent attention are channels of its keys.
            if name == "key" or not self.layout.rope_dim:
                old = remembered(self.layout, name, old, len(old))
            else:
                old = seen[0][: len(old), :, self.layout.rope_dim :]
            seen.append(torch.cat([old, given]))
            self.past[index] = past
        return _attend(states[0], *seen, positions, torch.cat([kept, positions]), options)


def _attend(query, key, value, positions, key_positions, options) -> Tensor:
    """Attention (L, Hq, D) in float64 by positions in the text."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    scores = torch.einsum("lhd,nhd->hln", query.double(), key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = positions[:, None] - key_positions
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
            cache.kept, cache.given = torch.tensor(step.kept, dtype=torch.int64), step.states
            rows = list(range(len(step.tokens) - len(step.logits), len(step.tokens)))
            pages = [list(range(-(-(step.start + len(step.tokens)) // 16)))]
            batch = make_batch([step.tokens], [step.start], pages, rows=rows)
            cache.compare(step.logits, engine.model.forward(batch, cache).values)
        worst = max(worst, cache.worst)
        assert cache.worst == cache.worst, f"sequence {number}: not a number"
    return worst
