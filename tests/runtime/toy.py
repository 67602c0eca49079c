"""A model whose logits depend on every token that it finds through page table and slots: a page mistake shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.sizing import kv_budget
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.draft_model import DraftModelProposer
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.speculation import NgramProposer, SpeculationController
from quantkit.runtime.model.adapters import Adapters
from quantkit.runtime.types import Completion, SamplingParams

VOCAB = 32


class ToyCache:
    """Token ids by slot, full of wrong ones at first; and who uses each residual row."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.layouts = ()
        self.tokens = np.random.default_rng(0).integers(0, VOCAB, num_pages * page_size)
        self.owners: dict[int, int] = {}

    def move_up(self, row: int, count: int) -> None:
        """Nothing here depends on a place."""


class ToyModel:
    """Next token is mostly 3 * last + 1, so n-grams repeat; where it is not, the whole history decides.

    Args:
        noise: how often the history decides.
        seed: of the part that history decides; drafts differ from their target by it.
    """

    paged = True
    is_recurrent = False
    vocab_size = VOCAB
    eos_ids: tuple[int, ...] = ()
    stored_bytes = num_bytes = 0
    notes = ()
    adapters = Adapters()
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, noise: float = 1.5, seed: int = 0, max_length: int = 10_000) -> None:
        generator = np.random.default_rng(seed)
        self.max_length = max_length
        self.table = (generator.standard_normal((997, VOCAB)) * noise).astype(np.float32)
        self.weights = np.random.default_rng(7).integers(1, 2**31, 20_000)
        self.num_forwards = 0
        self.forgotten: list[int] = []
        self.fail_at: int | None = None

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)

    def logits_of(self, ids: Sequence[int]) -> np.ndarray:
        """(T, V), what one forward over the whole history gives."""
        tokens = np.asarray(ids, dtype=np.int64)
        mixed = np.cumsum(tokens * self.weights[: len(tokens)] % 1_000_003)
        logits = self.table[mixed % 997].copy()
        logits[np.arange(len(tokens)), (3 * tokens + 1) % VOCAB] += 4
        return logits

    def forward(self, batch: ForwardBatch, cache: ToyCache) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == self.fail_at:
            raise RuntimeError("out of luck")
        check(batch, cache)
        cache.tokens[batch.slots.numpy()] = batch.token_ids.numpy()
        logits = []
        for index, (count, length) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
            positions = np.arange(length)
            pages = batch.page_table[index].numpy().astype(np.int64)
            history = cache.tokens[pages[positions // cache.page_size] * cache.page_size + positions % cache.page_size]
            logits.append(self.logits_of(history)[length - count :])
        return torch.from_numpy(np.concatenate(logits))[batch.logit_rows]


def check(batch: ForwardBatch, cache: ToyCache) -> None:
    """The promises of ForwardBatch and of KVCache's rules."""
    starts = batch.query_starts.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(batch.token_ids) == sum(batch.query_lengths)
    assert batch.page_table.dtype == batch.query_starts.dtype == torch.int32
    assert batch.token_ids.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
    assert len(set(batch.residual_rows.tolist())) == len(batch.residual_rows), "two sequences in one residual row"
    assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens in one slot"
    size = cache.page_size
    for index, (count, length) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
        positions = batch.positions[starts[index] : starts[index + 1]]
        assert positions.tolist() == list(range(length - count, length))
        pages = batch.page_table[index].long()
        slots = pages[positions // size] * size + positions % size
        assert slots.tolist() == batch.slots[starts[index] : starts[index + 1]].tolist()
        row, owner = int(batch.residual_rows[index]), batch.sequence_ids[index]
        if (length - count) % size == 0:
            cache.owners[row] = owner
        assert cache.owners[row] == owner, f"sequence {owner} uses the residual row of {cache.owners[row]}"


def build_engine(
    *,
    model: ToyModel | None = None,
    num_pages: int = 64,
    speculate: str | None = None,
    force: bool = True,
    tokenizer: Any = None,
    **settings: Any,
) -> Engine:
    """An engine over the toy model."""
    model = model or ToyModel()
    small = {"page_size": 4, "max_sequences": 8, "token_budget": 32, "overlap": False}
    config = EngineConfig(**{**small, **settings})
    proposer = None
    if speculate == "ngram":
        proposer = NgramProposer(3, 1)
    elif speculate is not None:
        draft = model if speculate == "self" else ToyModel(seed=1)
        cache = ToyCache(num_pages, config.page_size)
        proposer = DraftModelProposer(draft, cache, config, num_pages=num_pages, vocab_size=VOCAB)
    length = config.context_length(model.max_length)
    return Engine(
        model,
        ToyCache(num_pages, config.page_size),
        config,
        num_pages=num_pages,
        tokenizer=tokenizer,
        proposer=proposer,
        controller=None if proposer is None else SpeculationController(config.max_drafts, force=force),
        budget=kv_budget(config, length, num_pages, 0),
    )


def run(engine: Engine, *, check: bool = True, limit: int = 10_000) -> dict[int, Completion]:
    """Step until nothing is left; completions by request."""
    done = {}
    for _ in range(limit):
        if not engine.has_work:
            assert engine.pool.num_free == engine.pool.num_pages
            return done
        done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        if check:
            engine.check_integrity()
    raise AssertionError(f"not finished after {limit} steps")


def generate(engine: Engine, prompts: Iterable[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    """New tokens of each prompt."""
    numbers = [engine.add(prompt, params) for prompt in prompts]
    done = run(engine)
    return [done[number].token_ids for number in numbers]


def greedy(model: ToyModel, prompt: list[int], count: int) -> tuple[int, ...]:
    """What the model alone says, without an engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits_of(ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


def evicting(model: ToyModel, prompt: list[int], count: int, budget: int, chunk: int, size: int = 2) -> tuple[int, ...]:
    """The same with a budget: of pages of `size` tokens the first 4 tokens and the newest pages stay."""
    ids, kept, at = list(prompt), [], 0
    while len(ids) < len(prompt) + count:
        stop = min(len(prompt), (at // chunk + 1) * chunk) if at < len(prompt) else at + 1
        kept, at = kept + ids[at:stop], stop
        if at == len(ids):
            ids.append(int(model.logits_of(kept)[-1].argmax()))
        # Looked at where a chunk or the prompt ends, and after each token that follows it.
        if len(kept) >= budget:
            gone = -(-(len(kept) + 1 - budget) // size) * size
            kept = kept[:4] + kept[4 + gone :]
    return tuple(ids[len(prompt) :])


def prompts(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts of mixed lengths; every third begins like the first."""
    generator = np.random.default_rng(seed)
    drawn = [generator.integers(0, VOCAB, generator.integers(1, longest)).tolist() for _ in range(count)]
    for index in range(0, count, 3):
        drawn[index] = (drawn[0] + drawn[index])[: max(longest, 1)]
    return drawn


__all__ = ["VOCAB", "ToyCache", "ToyModel", "build_engine", "check", "evicting", "generate", "greedy", "prompts", "run"]
