"""Log-probabilities of known continuations: what choosing among answers and perplexity need, and nothing more.

Logits are computed only where a token is scored. Inputs that are equal are computed once; the full pages of a common
beginning are computed once too, by the first input that has it, while the others wait a step. With a quantized cache
what is scored reads everything before it from the cache, as generating it would.

Not a scheduler: everything is known in advance and nobody waits for an answer. See `scoring` for whole logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels.transfer import send
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.runner import Piece
from quantkit.runtime.types import SamplingParams, Sequence

_LOOK_AHEAD = 8  # times as many inputs as run together are searched for some that need not wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Tokens of which the last ones are scored.

    Args:
        ids: context and continuation; at least two tokens.
        num_scored: of the continuation; fewer than len(ids).
    """

    ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What a query gave.

    Args:
        logprobs: (num_scored,) float32, of each scored token given all before it.
        greedy: whether each of them was the likeliest.
    """

    logprobs: Tensor
    greedy: bool


@dataclass(slots=True, eq=False)
class _Input:
    """Tokens to feed, once for all queries that differ in their last token only or in where scoring begins."""

    sequence: Sequence
    targets: list[tuple[int, Query]]
    num_rows: int = 0

    @property
    def first_row(self) -> int:
        """Position of the first logits that are wanted."""
        return len(self.sequence.ids) - self.num_rows


def score_tokens(
    engine: Engine,
    queries: Many[Query],
    *,
    chunk_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[TokenScores]:
    """Score the continuation of every query.

    Args:
        engine: without requests.
        queries: each no longer than the context plus one: the last token is scored, not fed.
        chunk_size: tokens of a sequence per step; 1 takes the decode path. None = as many as a step takes.
        progress: told how many queries have been answered since the last time.
    Returns:
        in the order of the queries.
    Raises:
        RequestError: requests are running, or a query is too short, too long or of unknown tokens.
    """
    if engine.has_work:
        raise RequestError("requests are running; score when they have finished")
    if chunk_size is not None and chunk_size < 1:
        raise RequestError(f"chunk_size is {chunk_size}; give at least 1, or None")
    for query in queries:
        _check(engine, query)
    run = _Run(engine, _inputs(queries), chunk_size)
    while run.unfinished:
        answered = run.step()
        if progress is not None and answered:
            progress(answered)
    return [run.found[index] for index in range(len(queries))]


def _check(engine: Engine, query: Query) -> None:
    fed = len(query.ids) - 1
    if not 1 <= fed <= engine.capacity:
        raise RequestError(f"a text to score has {len(query.ids)} tokens; 2 to {engine.capacity + 1} fit")
    if not 1 <= query.num_scored <= fed:
        raise RequestError(f"{query.num_scored} of {len(query.ids)} tokens are to be scored; 1 to {fed} can be")
    if min(query.ids) < 0 or max(query.ids) >= engine.model.vocab_size:
        raise RequestError(f"a text to score has tokens outside 0 to {engine.model.vocab_size - 1}")


def _inputs(queries: Many[Query]) -> deque[_Input]:
    """One per distinct input, neighbours with a common beginning side by side."""
    inputs: dict[tuple[int, ...], _Input] = {}
    for index, query in enumerate(queries):
        fed = query.ids[:-1]
        if fed not in inputs:
            inputs[fed] = _Input(_sequence(-1 - len(inputs), fed), [])
        inputs[fed].targets.append((index, query))
        inputs[fed].num_rows = max(inputs[fed].num_rows, query.num_scored)
    return deque(inputs[fed] for fed in sorted(inputs))


def _sequence(number: int, ids: tuple[int, ...]) -> Sequence:
    """The engine's record of a text; negative numbers are no request's."""
    return Sequence(
        id=number,
        ids=list(ids),
        num_prompt=len(ids),
        params=SamplingParams(),
        limit=len(ids),
        seed=0,
        stop_ids=frozenset(),
        arrived=0.0,
    )


class _Run:
    """Inputs on their way through the engine's pages.

    Args:
        engine: whose.
        waiting: inputs in order.
        chunk_size: tokens of one input per step at most.
    """

    def __init__(self, engine: Engine, waiting: deque[_Input], chunk_size: int | None) -> None:
        self.found: dict[int, TokenScores] = {}
        self._engine = engine
        self._waiting = waiting
        self._running: list[_Input] = []
        self._rows = list(range(engine.options.max_sequences - 1, -1, -1))
        self._budget = engine.options.token_budget
        self._chunk = chunk_size or self._budget
        cache = engine.runner.cache
        self._splits = cache is not None and any(layout.is_quantized for layout in cache.layouts)

    @property
    def unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def step(self) -> int:
        """Compute one batch; how many queries it answered."""
        try:
            pieces = [(item, self._piece(item, size)) for item, size in self._schedule()]
            logits = self._engine.runner.run([piece for _, piece in pieces])
            return self._accept(pieces, logits)
        except BaseException:
            for item in tuple(self._running):
                self._release(item)
            self._waiting.clear()
            raise

    def _schedule(self) -> list[tuple[_Input, int]]:
        """Inputs and their numbers of tokens: those that run go on, others join as rows, pages and budget allow."""
        budget, work = self._budget, []
        computing: set[bytes] = set()
        for item in self._running:
            size = self._size(item, budget)
            if size > 0:
                work.append((item, size))
                budget -= size
            computing.update(self._missing(item, item.sequence.num_published))
        put_off = []
        for _ in range(min(len(self._waiting), _LOOK_AHEAD * self._engine.options.max_sequences)):
            if budget <= 0 or not self._rows:
                break
            item = self._waiting.popleft()
            missing = self._missing(item, len(self._engine.prefix.match(item.sequence)))
            # What it lacks first, or all of it (a key names everything before it too), is being computed.
            waits = bool(missing) and missing[-1 if self._splits else 0] in computing
            if waits or not self._admit(item):
                put_off.append(item)
                continue
            computing.update(missing)
            size = self._size(item, budget)
            if size > 0:
                work.append((item, size))
                budget -= size
        self._waiting.extendleft(reversed(put_off))
        return work

    def _missing(self, item: _Input, known: int) -> list[bytes]:
        """Keys of the pages before the scored rows that are still to be computed."""
        prefix = self._engine.prefix
        if not prefix.enabled:
            return []
        return prefix.keys(item.sequence, item.first_row // self._engine.options.page_size)[known:]

    def _admit(self, item: _Input) -> bool:
        """Give a row and all its pages to an input; False when pages are short."""
        engine, sequence = self._engine, item.sequence
        size = engine.options.page_size
        border = item.first_row // size
        shared = engine.prefix.match(sequence)[:border]
        if self._splits and len(shared) < border:
            shared = []  # half a beginning read from the cache is not what computing it alone would read
        needed = -(-len(sequence.ids) // size) - len(shared)
        if needed + sum(engine.pool.is_free(page) for page in shared) > engine.pool.num_free:
            return False
        engine.prefix.take(sequence, shared)
        sequence.pages += engine.pool.allocate(needed)
        sequence.row, sequence.tabled = self._rows.pop(), 0
        self._running.append(item)
        return True

    def _size(self, item: _Input, budget: int) -> int:
        """Tokens of its next step, 0 to wait.

        With a quantized cache it matters where steps end, since only what a step brings is read unrounded; so there
        they end at the last full page before the scored rows, before these, and every `_budget` tokens, whoever else
        is in the batch.
        """
        done, total = item.sequence.num_computed, len(item.sequence.ids)
        if not self._splits:
            return min(total - done, self._chunk, budget)
        page = self._engine.options.page_size
        ends = (item.first_row // page * page, item.first_row, total)
        size = min(next(end for end in ends if end > done) - done, self._chunk, self._budget)
        return size if size <= budget else 0

    def _piece(self, item: _Input, size: int) -> Piece:
        start = item.sequence.num_computed
        rows = max(0, start + size - max(start, item.first_row))
        return Piece(item.sequence, item.sequence.ids[start : start + size], start, rows)

    def _accept(self, pieces: list[tuple[_Input, Piece]], logits: Tensor) -> int:
        """Keep the scores of this step's rows; how many queries are answered with them."""
        self._keep(pieces, logits)
        answered = 0
        for item, piece in pieces:
            item.sequence.num_computed += len(piece.tokens)
            self._engine.prefix.publish(item.sequence)
            if item.sequence.num_computed == len(item.sequence.ids):
                answered += len(item.targets)
                self._release(item)
        return answered

    def _keep(self, pieces: list[tuple[_Input, Piece]], logits: Tensor) -> None:
        """Take the scored tokens out of the logits, all queries at once."""
        rows: list[int] = []
        tokens: list[int] = []
        owners: list[tuple[int, int]] = []
        at = 0
        for item, piece in pieces:
            end = piece.start + len(piece.tokens)
            first = end - piece.num_logits  # position of the first of this piece's rows
            for index, query in item.targets if piece.num_logits else ():
                begin = max(first, len(query.ids) - 1 - query.num_scored)
                if begin < end:
                    rows += range(at + begin - first, at + end - first)
                    tokens += query.ids[begin + 1 : end + 1]
                    owners.append((index, end - begin))
            at += piece.num_logits
        if not owners:
            return
        row, token = send(logits.device, np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64))
        counts = [count for _, count in owners]
        scored = torch.split_with_sizes(logits.log_softmax(-1)[row, token].cpu(), counts)
        greedy = torch.split_with_sizes((logits.argmax(-1)[row] == token).cpu(), counts)
        for (index, _), logprobs, right in zip(owners, scored, greedy, strict=True):
            known = self.found.get(index)
            self.found[index] = TokenScores(
                logprobs=logprobs if known is None else torch.cat((known.logprobs, logprobs)),
                greedy=bool(right.all()) and (known is None or known.greedy),
            )

    def _release(self, item: _Input) -> None:
        self._running.remove(item)
        self._rows.append(item.sequence.row)
        self._engine.pool.release(item.sequence.pages)
        self._engine.model.forget(item.sequence.id)
