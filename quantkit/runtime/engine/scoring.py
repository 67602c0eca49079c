"""Logits of given tokens through the cache: what the engine computes when it generates, for tokens already known.

With a chunk size of 1 every token takes the decode path, reading all others from the cache; that is how the error of
a quantized cache shows in a perplexity.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.runner import Piece


@dataclass(slots=True, eq=False)
class _Scored:
    """A sequence of known tokens, its pages and its logits so far."""

    id: int
    row: int
    ids: list[int]
    pages: list[int]
    tabled: int = 0
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


def score(engine: Engine, sequences: Many[Many[int]], chunk_size: int | None = None) -> list[Tensor]:
    """Logits after every token of every sequence.

    Args:
        engine: without requests; its pages are used and given back, the prefix cache is not.
        sequences: token ids, none empty, none longer than the context or the pool.
        chunk_size: tokens of a sequence per step; None = as many as a step takes.
    Returns:
        (T, V) float32 on the CPU for each sequence; row t is the prediction of token t + 1.
    Raises:
        RequestError: requests are running, or a sequence is empty, too long or of unknown tokens.
    """
    if engine.has_work:
        raise RequestError("requests are running; score when they have finished")
    if chunk_size is not None and chunk_size < 1:
        raise RequestError(f"chunk_size is {chunk_size}; give at least 1, or None")
    for ids in sequences:
        _check(engine, ids)
    size = chunk_size or engine.options.token_budget
    found: list[Tensor] = []
    for group in _groups(engine, sequences, size):
        found += _score_group(engine, group, size)
    return found


def _check(engine: Engine, ids: Many[int]) -> None:
    if not 1 <= len(ids) <= engine.capacity:
        raise RequestError(f"a sequence to score has {len(ids)} tokens; 1 to {engine.capacity} fit")
    if min(ids) < 0 or max(ids) >= engine.model.vocab_size:
        raise RequestError(f"a sequence to score has tokens outside 0 to {engine.model.vocab_size - 1}")


def _groups(engine: Engine, sequences: Many[Many[int]], size: int) -> Iterator[list[Many[int]]]:
    """Sequences that run together: as many as rows, pages and the budget of a step allow, in order."""
    most = min(engine.options.max_sequences, max(1, engine.options.token_budget // size))
    group: list[Many[int]] = []
    pages = 0
    for ids in sequences:
        needed = -(-len(ids) // engine.options.page_size)
        if group and (len(group) == most or pages + needed > engine.pool.num_pages):
            yield group
            group, pages = [], 0
        group.append(ids)
        pages += needed
    if group:
        yield group


@torch.inference_mode()
def _score_group(engine: Engine, group: list[Many[int]], size: int) -> list[Tensor]:
    scored: list[_Scored] = []
    try:
        for row, ids in enumerate(group):
            pages = engine.pool.allocate(-(-len(ids) // engine.options.page_size))
            scored.append(_Scored(-1 - row, row, list(ids), pages))  # requests have numbers from 0 on
        going = scored
        while going:
            _advance(engine, going, size)
            going = [item for item in going if item.num_computed < len(item.ids)]
    finally:
        for item in scored:
            engine.pool.release(item.pages)
            engine.model.forget(item.id)
    return [torch.cat(item.logits) for item in scored]


def _advance(engine: Engine, going: list[_Scored], size: int) -> None:
    """One step: the next chunk of each."""
    pieces = []
    for item in going:
        tokens = item.ids[item.num_computed : item.num_computed + size]
        pieces.append(Piece(item, tokens, item.num_computed, len(tokens)))
    logits = engine.runner.run(pieces).float().cpu()
    at = 0
    for item, piece in zip(going, pieces, strict=True):
        item.num_computed += len(piece.tokens)
        item.logits.append(logits[at : at + len(piece.tokens)].clone())
        at += len(piece.tokens)
