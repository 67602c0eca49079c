"""Items of an evaluation in batches, of which whichever rank is free takes the next; every rank gets all answers.

What a model says of an item depends, in the last bits, on what is computed beside it and on what was cached before. So
batches are cut by the items alone, never by how many ranks there are, and each begins with nothing cached: whoever
computes a batch, alone or not, its answers are the same bits. All ranks must have the same number of threads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from quantkit.distributed import share_out
from quantkit.evaluate.engine import Evaluated
from quantkit.machine.memory import release_freed_memory
from quantkit.quantities import elapsed
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import Completion, PromptScores, SamplingParams, ScoredText

_LINES, _PAUSE_S = 20, 2.0  # about the progress of a job, at most; seconds between two of them, at least
_PARTS = 4  # batches come in fours, so that two and four ranks have equally much to do
# Of a batch, at least where there is so much, and at most: tokens of prompts that are computed as wholes, in a few
# steps of the engine; rows that are computed token by token, of which few take nearly as long as many.
_TOKENS, _SCORED, _GENERATED = (1024, 4096), (8, 32), (16, 64)


Say = Callable[[str], None]


class Meter:
    """Say how much of a job is done and how long the rest will take: at most once for each 5 %, and each 2 seconds.

    Args:
        say: is told a line.
        items: what they are called, e.g. "requests".
        weights: of the items in the order in which they are computed: what part of the time each takes.
    """

    def __init__(self, say: Say, items: str, weights: Sequence[int]) -> None:
        self._say, self._items, self._ends = say, items, list(accumulate(weights))
        self._began = self._last = time.monotonic()
        self._line = 0

    def reach(self, done: int) -> None:
        """So many items are done, by all ranks together as far as one of them can know."""
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
    """`score_tokens` of the model, all texts in order.

    Args:
        llm: to score with.
        texts: to score.
        chunk_size: see `LLM.score`.
        say: is told how far it is; of several ranks, each says it.
        items: what it calls the texts.
    """
    if not isinstance(llm, LLM):  # vLLM, which is no part of a distributed run
        meter = Meter(say, items, [len(text.ids) for text in texts]) if say and texts else None
        return llm.score_tokens(texts, chunk_size=chunk_size, progress=_counted(meter, 0))
    # As the engine sorts them: neighbours share their beginnings, which a batch computes once.
    order = sorted(range(len(texts)), key=lambda number: texts[number].ids)
    weights = [1] * len(texts) if chunk_size == 1 else _new_tokens([texts[number].ids for number in order])
    batches = cut(weights, *(_SCORED if chunk_size == 1 else _TOKENS))
    meter = Meter(say, items, weights) if say and texts else None

    def score(batch: range) -> list[PromptScores]:
        forget(llm)
        chosen = [texts[order[at]] for at in batch]
        return llm.score_tokens(chosen, chunk_size=chunk_size, progress=_counted(meter, batch.start))

    by_number = dict(zip(order, chain.from_iterable(share_out(batches, score)), strict=True))
    return [by_number[number] for number in range(len(texts))]


def _counted(meter: Meter | None, done: int) -> Callable[[int], None] | None:
    """Return what a meter is told by: how many items are done since the last time, after so many."""
    if meter is None:
        return None

    def add(count: int) -> None:
        nonlocal done
        done += count
        meter.reach(done)

    return add


def generate_in_turns(
    llm: Evaluated,
    prompts: Sequence[str | Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    say: Say | None = None,
) -> list[Completion]:
    """`generate` of the model, all prompts in order; `say` is told how far it is."""
    if not isinstance(llm, LLM):
        return llm.generate(prompts, params)
    # A request without a seed draws by its number, which differs from rank to rank.
    seeded = [replace(each, seed=n) if each.seed is None else each for n, each in enumerate(params)]

    meter = Meter(say, "answers", [1] * len(prompts)) if say and prompts else None

    def generate(batch: range) -> list[Completion]:
        forget(llm)
        written = llm.generate([prompts[at] for at in batch], [seeded[at] for at in batch])
        if meter is not None:
            meter.reach(batch.stop)
        return written

    batches = cut([1] * len(prompts), *_GENERATED)
    return list(chain.from_iterable(share_out(batches, generate)))


def cut(weights: Sequence[int], least: int, most: int) -> list[range]:
    """Items in neighbouring batches of about equal weight.

    Args:
        weights: of the items.
        least, most: of a batch, about.
    """
    total = sum(weights)
    count = min(len(weights), max(1, total // least), _PARTS * -(-total // (_PARTS * most)))
    # An item belongs to the batch in which its middle lies, one without weight to that of the item before.
    ends = zip(accumulate(weights), weights, strict=True)
    owners = [min(count - 1, (2 * end - weight - 1) * count // (2 * total)) for end, weight in ends]
    starts = [at for at, owner in enumerate(owners) if at == 0 or owner != owners[at - 1]]
    return [range(start, end) for start, end in pairwise([*starts, len(owners)])]


def _new_tokens(ids: Sequence[tuple[int, ...]]) -> list[int]:
    """Return for each text the number of tokens behind those that it shares with the one before."""
    return [len(own) - _shared(own, before) for own, before in zip(ids, [(), *ids], strict=False)]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def forget(llm: Evaluated) -> None:
    """Have a model that runs nothing begin with nothing cached; vLLM keeps what it has."""
    if isinstance(llm, LLM):
        llm.engine.pool.forget()
        # Kept scores, a few bytes each, lie between freed logits, which would take ever more memory otherwise.
        release_freed_memory()
