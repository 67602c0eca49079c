"""Items of an evaluation in batches, of which whichever rank is free takes the next; every rank gets all answers.

What a model says of an item depends, in the last bits, on what is computed beside it and on what was cached before. So
batches are cut by the items alone, never by how many ranks there are, and each begins with nothing cached: whoever
computes a batch, alone or not, its answers are the same bits. All ranks must have the same number of threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from quantkit.checkpoints.memory import release_freed_memory
from quantkit.distributed import share_out
from quantkit.evaluate.engine import Evaluated
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import Completion, PromptScores, SamplingParams, ScoredText

_PARTS = 4  # batches come in fours, so that two and four ranks have equally much to do
# Of a batch, at least where there is so much, and at most: tokens of prompts that are computed as wholes, in a few
# steps of the engine; rows that are computed token by token, of which few take nearly as long as many.
_TOKENS, _SCORED, _GENERATED = (1024, 4096), (8, 32), (16, 64)


def score_in_turns(
    llm: Evaluated,
    texts: Sequence[ScoredText],
    *,
    chunk_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[PromptScores]:
    """`score_tokens` of the model, all texts in order; `progress` is told of this rank's."""
    if not isinstance(llm, LLM):  # vLLM, which is no part of a distributed run
        return llm.score_tokens(texts, chunk_size=chunk_size, progress=progress)
    # As the engine sorts them: neighbours share their beginnings, which a batch computes once.
    order = sorted(range(len(texts)), key=lambda number: texts[number].ids)
    weights = [1] * len(texts) if chunk_size == 1 else _new_tokens([texts[number].ids for number in order])
    batches = cut(weights, *(_SCORED if chunk_size == 1 else _TOKENS))

    def score(batch: range) -> list[PromptScores]:
        forget(llm)
        chosen = [texts[order[at]] for at in batch]
        return llm.score_tokens(chosen, chunk_size=chunk_size, progress=progress)

    by_number = dict(zip(order, chain.from_iterable(share_out(batches, score)), strict=True))
    return [by_number[number] for number in range(len(texts))]


def generate_in_turns(
    llm: Evaluated, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """`generate` of the model, all prompts in order."""
    if not isinstance(llm, LLM):
        return llm.generate(prompts, params)
    # A request without a seed draws by its number, which differs from rank to rank.
    seeded = [replace(each, seed=n) if each.seed is None else each for n, each in enumerate(params)]

    def generate(batch: range) -> list[Completion]:
        forget(llm)
        return llm.generate([prompts[at] for at in batch], [seeded[at] for at in batch])

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
    """Of each text, how many follow what it shares with the one before."""
    return [len(own) - _shared(own, before) for own, before in zip(ids, [(), *ids], strict=False)]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def forget(llm: Evaluated) -> None:
    """Have a model that runs nothing begin with nothing cached; vLLM keeps what it has."""
    if isinstance(llm, LLM):
        llm.engine.pool.forget()
        # Kept scores, a few bytes each, lie between freed logits, which would take ever more memory otherwise.
        release_freed_memory()
