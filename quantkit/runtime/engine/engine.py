"""The engine: requests in, tokens out, one step at a time. Continuous batching over a paged cache.

A step: propose drafts -> schedule -> forward -> choose tokens -> accept, publish full pages, end what has ended. It
belongs to one thread; a server calls it from its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from quantkit.errors import RequestError
from quantkit.kernels.types import Logits
from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.cache.prefix_cache import PrefixCache
from quantkit.runtime.engine.capacity import Room
from quantkit.runtime.engine.detokenizer import TextStream, decoder
from quantkit.runtime.engine.overlap import Flight, Overlap
from quantkit.runtime.engine.runner import Piece, Runner
from quantkit.runtime.engine.scheduler import Scheduler, SchedulerOptions, Work
from quantkit.runtime.sampling.penalties import TokenHistory
from quantkit.runtime.sampling.sampler import Rows, derived_seed, log_probabilities, sample
from quantkit.runtime.types import FinishReason, SamplingParams, Sequence, StepOutput, TokenLogprob

if TYPE_CHECKING:
    from quantkit.runtime.cache.kv_cache import KVCache
    from quantkit.runtime.engine.speculation import Proposer
    from quantkit.runtime.engine.speculation_controller import Governor
    from quantkit.runtime.model.model import Model


class Engine:
    """Runs requests on a model.

    Args:
        model: to run.
        cache: its keys and values; None when the model keeps its own (then pages only count tokens).
        num_pages: of the cache.
        options: limits of a step.
        tokenizer: a transformers tokenizer, for texts and stop texts; None = tokens only.
        prefix_cache: whether pages with a common beginning are shared.
        proposer: guesses tokens; None = no speculation.
        governor: says how many; needed with a proposer.
        eos_ids: tokens that end a request, besides the model's.
        identity: of model and KV format, for the prefix cache.
        max_length: tokens of a sequence at most; None = what the model can.
        seed: of requests that bring none.
        overlap: launch the next decode step before the tokens of the last are read; None = on CUDA devices. The tokens
            are the same.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache | None,
        *,
        num_pages: int,
        options: SchedulerOptions,
        tokenizer: Any = None,
        prefix_cache: bool = True,
        proposer: Proposer | None = None,
        governor: Governor | None = None,
        eos_ids: Many[int] = (),
        identity: str = "",
        max_length: int | None = None,
        seed: int = 0,
        overlap: bool | None = None,
    ) -> None:
        assert (proposer is None) == (governor is None), "a proposer and a governor go together"
        self.model = model
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache(self.pool, options.page_size, identity=identity, enabled=prefix_cache and model.paged)
        self.scheduler = Scheduler(self.pool, self.prefix, options, self._forget)
        self.governor = governor
        self.options = options
        self.max_length = model.max_length if max_length is None else min(max_length, model.max_length)
        self.capacity = min(self.max_length, num_pages * options.page_size)
        self._eos_ids = frozenset((*model.eos_ids, *eos_ids))
        self._proposer = proposer
        self._decode = None if tokenizer is None else decoder(tokenizer)
        self._requests: dict[int, Sequence] = {}
        self._failed: list[StepOutput] = []
        self._num_added = 0
        self._seed = seed
        self.runner = Runner(
            model,
            cache,
            max_sequences=options.max_sequences,
            max_pages=-(-self.capacity // options.page_size),
            page_size=options.page_size,
            device=model.device,
        )
        overlap = model.device.type == "cuda" if overlap is None else overlap
        self._overlap = Overlap(self.runner, self.scheduler) if overlap and proposer is None and model.paged else None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._failed)

    def add(self, prompt_ids: Many[int], params: SamplingParams = SamplingParams()) -> int:  # noqa: B008 - frozen
        """Queue a request.

        Args:
            prompt_ids: at least one token.
            params: how to continue.
        Returns:
            its number, as in `StepOutput`.
        Raises:
            RequestError: an empty prompt, unknown tokens, more tokens than ever fit (the message says how many do), or
                stop texts without a tokenizer.
        """
        ids = self._checked(prompt_ids, params)
        now = time.perf_counter()
        number = self._num_added
        self._num_added += 1
        sequence = Sequence(
            id=number,
            ids=ids,
            num_prompt=len(ids),
            params=params,
            limit=self.capacity if params.max_tokens is None else len(ids) + params.max_tokens,
            seed=derived_seed(self._seed, number) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            arrived=now,
            text=None if self._decode is None else TextStream(self._decode, ids, params.stop_texts),
            history=TokenHistory(ids) if params.has_penalties else None,
        )
        self._requests[number] = sequence
        self.scheduler.add(sequence)
        return number

    def _checked(self, prompt_ids: Many[int], params: SamplingParams) -> list[int]:
        try:
            ids = [index(token) for token in prompt_ids]
        except TypeError as error:
            raise RequestError(f"the prompt is not a list of token numbers ({error})") from None
        room = Room(capacity=self.capacity, max_length=self.max_length)
        room.check(len(ids), params.max_tokens)
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(f"the prompt holds token {wrong}; the model knows 0 to {self.model.vocab_size - 1}")
        if params.stop_texts and self._decode is None:
            raise RequestError("stop texts need a tokenizer, and this engine has none; use stop_token_ids")
        return ids

    def cancel(self, request_id: int) -> StepOutput | None:
        """End a request now and free its pages; None when it is not alive (any more)."""
        sequence = self._requests.get(request_id)
        if sequence is None:
            return None
        return self._end(sequence, "cancelled", (), "")

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Compute one batch.

        Returns:
            news of the requests that got tokens or ended.
        Raises:
            Exception: whatever the model raised. All requests that were running have ended with "error" then, their
                pages are free, and the next step says so; those that wait go on.
        """
        if self._failed:
            failed, self._failed = self._failed, []
            return failed
        outputs: list[StepOutput] = []
        try:
            if self._requests:
                self._step(outputs)
            return outputs
        except BaseException:
            if self._overlap is not None:
                self._overlap.forget()
            ended = [self._end(sequence, "error", (), "") for sequence in tuple(self.scheduler.running)]
            self._failed = [*outputs, *ended]
            raise

    def _step(self, outputs: list[StepOutput]) -> None:
        """One batch; its news are added to the outputs one by one, so that none is lost when something fails."""
        began = time.perf_counter()
        if self._overlap is not None and (flight := self._overlap.next(self._requests)) is not None:
            self._land(flight, outputs)
            return
        asked = self._propose() if self._proposer is not None else 0
        work = self.scheduler.schedule()
        pieces, rows = [], []
        for sequence, count in work:
            piece = _piece(sequence, count)
            pieces.append(piece)
            if piece.num_logits == 1:
                rows.append((sequence, 0))
            else:
                rows.extend((sequence, ahead) for ahead in range(piece.num_logits))
        if self._overlap is not None and self._overlap.launch(work, pieces):
            flight = self._overlap.next(self._requests)
            assert flight is not None, "what was launched just now has no living request"
            self._land(flight, outputs)
            return
        drafts = [piece.num_logits - 1 for piece in pieces if piece.num_logits > 1]
        logits = self.runner.step(pieces)
        self._accept_all(work, pieces, logits, rows, outputs)
        if self.governor is not None and (drafts or not asked) and len(rows) == sum(count for _, count in work):
            self.governor.timed(len(work), time.perf_counter() - began, drafts)

    def _propose(self) -> int:
        """Have drafts proposed for the sequences that decode; how many were asked for."""
        assert self._proposer is not None
        assert self.governor is not None
        decoding = [s for s in self.scheduler.running if len(s.ids) - s.num_computed == 1]
        count = self.governor.choose(len(self.scheduler.running)) if decoding else 0
        if count:
            self._proposer.propose(decoding, count)
        return count

    def _accept_all(
        self, work: Work, pieces: list[Piece], logits: Logits, rows: Rows, outputs: list[StepOutput]
    ) -> None:
        """Choose tokens and give each sequence its own."""
        if not rows:
            tokens, logprobs = [], None
        else:
            tokens = sample(logits, rows)
            logprobs = log_probabilities(logits.values, rows, tokens)
        now = time.perf_counter()
        at = 0
        for (sequence, count), piece in zip(work, pieces, strict=True):
            if piece.num_logits == 0:  # a prompt that goes on
                sequence.num_computed += count
                self.prefix.publish(sequence)
                continue
            end = at + piece.num_logits
            chosen = tokens[at:end]
            if piece.num_logits > 1:
                chosen = self._verified(sequence, chosen)
            sequence.num_computed = len(sequence.ids) + len(chosen) - 1
            outputs.append(self._append(sequence, chosen, now, logprobs[at:end] if logprobs else None))
            at = end

    def _land(self, flight: Flight, outputs: list[StepOutput]) -> None:
        """Give each sequence of a step that was launched before its token; those that have ended since want none."""
        tokens = flight.reading.read()
        now = time.perf_counter()
        for sequence, token in zip(flight.sequences, tokens, strict=True):
            if sequence.id in self._requests:
                sequence.num_computed = len(sequence.ids)
                outputs.append(self._append(sequence, [token], now, None))

    def _verified(self, sequence: Sequence, chosen: list[int]) -> list[int]:
        """The chosen tokens up to the first that a draft did not foresee: that one is right too, the rest is not."""
        accepted = 0
        for draft, token in zip(sequence.drafts, chosen, strict=False):
            if draft != token:
                break
            accepted += 1
        if self.governor is not None:
            self.governor.accepted(len(sequence.drafts), accepted)
        sequence.drafts = []
        return chosen[: accepted + 1]

    def _append(
        self, sequence: Sequence, tokens: list[int], now: float, logprobs: list[TokenLogprob | None] | None
    ) -> StepOutput:
        """Add tokens until one ends the request; the news."""
        reason: FinishReason | None = None
        text, found, first = "", False, len(sequence.ids)
        for place, token in enumerate(tokens):
            sequence.ids.append(token)
            sequence.token_times.append(now)
            if sequence.history is not None:
                sequence.history.add(token)
            if logprobs is not None and (logprob := logprobs[place]) is not None:
                sequence.logprobs.append(logprob)
            if token in sequence.stop_ids:
                reason = "stop"
                break
            if sequence.text is not None:
                piece, found = sequence.text.push(token)
                text += piece
            if found or len(sequence.ids) >= sequence.limit:
                reason = "stop" if found else "length"
                break
        sequence.num_computed = min(sequence.num_computed, len(sequence.ids))
        self.prefix.publish(sequence)
        added = tuple(sequence.ids[first:])
        if reason is not None:
            if sequence.text is not None and not found:
                rest, found = sequence.text.flush()
                text, reason = text + rest, "stop" if found else reason
            return self._end(sequence, reason, added, text)
        if text:
            sequence.pieces.append(text)
        return StepOutput(request_id=sequence.id, token_ids=added, text=text)

    def _end(self, sequence: Sequence, reason: FinishReason, added: tuple[int, ...], text: str) -> StepOutput:
        """Take a request out; its pages are free afterwards."""
        sequence.pieces.append(text)
        del self._requests[sequence.id]
        self.scheduler.remove(sequence)
        self._forget(sequence)
        completion = sequence.complete(reason, time.perf_counter())
        return StepOutput(request_id=sequence.id, token_ids=added, text=text, completion=completion)

    def _forget(self, sequence: Sequence) -> None:
        """A sequence has lost its pages, for now or for good."""
        self.model.forget(sequence.id)
        if self._proposer is not None:
            self._proposer.forget(sequence.id)

    def check_integrity(self) -> None:
        """Compare pages, queues and requests.

        Raises:
            AssertionError: something is lost or doubled.
        """
        self.scheduler.check_integrity()
        alive = {sequence.id for sequence in (*self.scheduler.running, *self.scheduler.waiting)}
        assert alive == self._requests.keys(), f"requests {self._requests.keys() ^ alive} are lost"
        if self._proposer is not None:
            self._proposer.check_integrity(alive)


def _piece(sequence: Sequence, count: int) -> Piece:
    """The tokens of a sequence's next step, drafts last."""
    start = sequence.num_computed
    drafts = sequence.drafts
    end = start + count - len(drafts)
    tokens = sequence.ids[start:end]
    if drafts:
        tokens += drafts
    return Piece(sequence, tokens, start, 1 + len(drafts) if end == len(sequence.ids) else 0)
