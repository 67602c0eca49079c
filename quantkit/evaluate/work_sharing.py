"""Distribute the items of an evaluation in batches: a free rank takes the next batch, and every rank gets all answers.

The last bits of an answer depend on the other items in the same batch and on cached prefixes. So the batches depend
only on the items, not on the number of ranks, and each batch starts with an empty cache. Answers are then bit-identical
for any number of ranks, if all ranks have the same number of threads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from quantkit.distributed import share_out
from quantkit.evaluate.loading import Evaluated
from quantkit.machine.memory import release_freed_memory
from quantkit.quantities import elapsed
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import Completion, PromptScores, SamplingParams, ScoredText

_LINES, _PAUSE_S = 20, 2.0  # maximum progress lines per job; minimum seconds between two lines
_PARTS = 4  # many items give a multiple of this number of batches, so that two or four ranks get equal work
# Minimum and maximum size of a batch: tokens of prompts in prefill, texts to score token by token, and answers to
# generate. A few of these texts or answers take nearly as long as many.
_TOKENS, _SCORED, _GENERATED = (1024, 4096), (8, 32), (16, 64)

Say = Callable[[str], None]


def about(subject: str, say: Say) -> Say:
    """Return a callback that puts a subject before each progress message."""
    return lambda line: say(f"{subject}: {line}")


class Meter:
    """Reports progress and the estimated remaining time: at most once per 5 % of the work, and at most every 2 seconds.

    Args:
        say: callback for progress messages; None = report nothing.
        items: noun for the items, e.g. "requests".
        weights: relative time of each item, in the order of computation.
    """

    def __init__(self, say: Say | None, items: str, weights: Sequence[int]) -> None:
        self._say, self._items, self._ends = say, items, list(accumulate(weights))
        self._began = self._last = time.monotonic()
        self._line = 0

    def reach(self, done: int) -> None:
        """Report that the first `done` items are done; in a distributed run, other ranks may still compute some."""
        if self._say is None:
            return
        share, now = self._ends[done - 1] / self._ends[-1], time.monotonic()
        if int(share * _LINES) == self._line or now - self._last < _PAUSE_S:
            return
        self._line, self._last = int(share * _LINES), now
        left = (now - self._began) * (1 - share) / share
        rest = f"about {elapsed(left)} left" if share < 1 else f"{elapsed(now - self._began)}"
        self._say(f"{done:,} of {len(self._ends):,} {self._items}, {rest}")


def score_in_turns(
    llm: Evaluated,
    texts: Sequence[ScoredText],
    *,
    chunk_size: int | None = None,
    say: Say | None = None,
    items: str = "requests",
) -> list[PromptScores]:
    """Score texts with the model's `score_tokens`. The ranks share the work; the results are in the order of the texts.

    Args:
        llm: model to score with.
        texts: texts to score.
        chunk_size: see `LLM.score`.
        say: callback for progress; every rank calls its own.
        items: noun for the texts in progress lines.
    """
    if not isinstance(llm, LLM):  # vLLM, which never takes part in a distributed run
        meter = Meter(say, items, [len(text.ids) for text in texts])
        return llm.score_tokens(texts, chunk_size=chunk_size, progress=_counted(meter, 0))
    # Sorted as in the engine: neighbours share their beginnings, which a batch computes only once.
    order = sorted(range(len(texts)), key=lambda number: texts[number].ids)
    weights = [1] * len(texts) if chunk_size == 1 else _new_tokens([texts[number].ids for number in order])
    batches = cut(weights, *(_SCORED if chunk_size == 1 else _TOKENS))
    meter = Meter(say, items, weights)

    def score(batch: range) -> list[PromptScores]:
        forget(llm)
        chosen = [texts[order[at]] for at in batch]
        return llm.score_tokens(chosen, chunk_size=chunk_size, progress=_counted(meter, batch.start))

    by_number = dict(zip(order, chain.from_iterable(share_out(batches, score)), strict=True))
    return [by_number[number] for number in range(len(texts))]


def _counted(meter: Meter, done: int) -> Callable[[int], None]:
    """Return a callback that adds newly finished items to `done` and reports the sum."""

    def add(count: int) -> None:
        nonlocal done
        done += count
        meter.reach(done)

    return add


def generate_in_turns(
    llm: Evaluated, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams], *, say: Say | None = None
) -> list[Completion]:
    """Generate answers to prompts. The ranks share the work; the answers are in the order of the prompts.

    Args:
        llm: model that answers.
        prompts: texts or token ids.
        params: sampling parameters of each prompt.
        say: callback for progress.
    """
    if not isinstance(llm, LLM):
        return llm.generate(prompts, params)
    # Without a seed, a request's random numbers depend on its number, which differs from rank to rank.
    seeded = [replace(each, seed=n) if each.seed is None else each for n, each in enumerate(params)]

    meter = Meter(say, "answers", [1] * len(prompts))

    def generate(batch: range) -> list[Completion]:
        forget(llm)
        written = llm.generate([prompts[at] for at in batch], [seeded[at] for at in batch])
        meter.reach(batch.stop)
        return written

    batches = cut([1] * len(prompts), *_GENERATED)
    return list(chain.from_iterable(share_out(batches, generate)))


def cut(weights: Sequence[int], least: int, most: int) -> list[range]:
    """Split items into consecutive batches of about equal weight.

    Args:
        weights: relative computing time of each item.
        least, most: approximate minimum and maximum weight of a batch.
    """
    total = sum(weights)
    count = min(len(weights), max(1, total // least), _PARTS * -(-total // (_PARTS * most)))
    # An item belongs to the batch that contains its midpoint; an item of weight 0 joins that of the item before it.
    ends = zip(accumulate(weights), weights, strict=True)
    owners = [min(count - 1, (2 * end - weight - 1) * count // (2 * total)) for end, weight in ends]
    starts = [at for at, owner in enumerate(owners) if at == 0 or owner != owners[at - 1]]
    return [range(start, end) for start, end in pairwise([*starts, len(owners)])]


def _new_tokens(ids: Sequence[tuple[int, ...]]) -> list[int]:
    """Return for each text the number of tokens after the prefix that it shares with the text before it."""
    return [len(own) - shared_length(own, before) for own, before in zip(ids, [(), *ids], strict=False)]


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the beginning that two sequences share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def forget(llm: Evaluated) -> None:
    """Clear the prefix cache of an idle model; vLLM keeps its cache."""
    if isinstance(llm, LLM):
        llm.engine.pool.forget()
        # Small scores stay between freed logits. Without this call, the process would keep more and more freed memory.
        release_freed_memory()
