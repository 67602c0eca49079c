"""The engine: computes tokens and scores for requests, step by step, with continuous batching over a paged cache.

A step: propose drafts -> schedule -> forward -> score prompts, choose tokens -> accept tokens, publish full pages,
finish requests. Only one thread may call an engine.
"""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from operator import index
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.machine.devices import entered
from quantkit.models.kv_budget import KVBudget
from quantkit.runtime.cache import policies
from quantkit.runtime.cache.eviction import Evictor
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.pages import PagePool, PrefixCache
from quantkit.runtime.cache.sizing import Capacity
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.detokenizer import TextStream, decoder
from quantkit.runtime.engine.batch_builder import ScheduledChunk, chunk_of, following_tokens, last_rows
from quantkit.runtime.engine.overlap import InFlightStep, Overlap
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.engine.scheduler import Scheduler, Work
from quantkit.runtime.engine.scoring import collect_scores, empty_scores
from quantkit.runtime.engine.speculation import Proposer, SpeculationController
from quantkit.runtime.json_output import JsonSchemas
from quantkit.runtime.model.model import Model
from quantkit.runtime.sampling import Rows, derived_seed, log_probabilities, sample, select_rows
from quantkit.runtime.sequence import Sequence, TokenHistory
from quantkit.runtime.types import FinishReason, SamplingParams, StepOutput, TokenLogprob

_DECODERS = 16  # cached decoders, one for each set of special tokens that requests show


class Engine:
    """Runs requests on a model.

    Args:
        model: model to run.
        cache: KV cache; None if the model keeps its own keys and values (pages then only count tokens).
        config: settings.
        num_pages: pages in the cache.
        tokenizer: a transformers tokenizer, for texts and stop texts; None = the engine handles tokens only.
        proposer: proposes draft tokens; None = no speculation.
        controller: chooses the number of draft tokens; required with a proposer.
        identity: identity of model and KV format, for the prefix cache.
        budget: KV budget of each sequence; None = no eviction.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache | None,
        config: EngineConfig,
        *,
        num_pages: int,
        tokenizer: Any = None,
        proposer: Proposer | None = None,
        controller: SpeculationController | None = None,
        identity: str = "",
        budget: KVBudget | None = None,
    ) -> None:
        assert (proposer is None) == (controller is None), "a proposer and a controller go together"
        self.model, self.config, self.controller = model, config, controller
        self.pool = PagePool(num_pages)
        # A page holds only keys and values: the state of recurrent layers at the page's end is not kept.
        shared = config.prefix_cache and model.paged and not model.is_recurrent
        self.eviction: Evictor | None = None
        if budget is not None:
            assert cache is not None, "a model that keeps its own keys and values has no budget"
            policy = policies.REGISTRY.load(config.kv_policy or policies.DEFAULT)
            self.eviction = Evictor(budget, policy, self.pool, cache)
        most = None if budget is None else budget.tokens - 1  # no sequence evicts before it has more tokens than this
        keys: dict[str, Any] = {"identity": identity, "adapters": model.adapters.digests}
        self.prefix = PrefixCache(self.pool, config.page_size, enabled=shared, most=most, **keys)
        quantized = cache is not None and any(layout.scheme.is_quantized for layout in cache.layouts)
        self.scheduler = Scheduler(
            self.pool, self.prefix, config, self._forget, eviction=self.eviction, fixed_chunks=quantized
        )
        self._limits = Capacity.of(config, model.max_length, num_pages, budget)
        self.capacity = self._limits.num_tokens
        self._eos_ids = frozenset(model.eos_ids)
        self._proposer = proposer
        self._decode = None if tokenizer is None else lru_cache(_DECODERS)(partial(decoder, tokenizer))
        self.schemas = JsonSchemas(tokenizer, model.vocab_size, tuple(model.eos_ids))
        self._requests: dict[int, Sequence] = {}
        self._failed: list[StepOutput] = []
        self._num_added = 0
        held = self.capacity if budget is None else min(self.capacity, budget.peak)
        self.runner = Runner(model, cache, config, max_pages=config.pages_for(held), max_length=self.capacity)
        if proposer is not None:
            proposer.connect(self.runner, self.scheduler.reserve)
        overlap = model.device.type == "cuda" if config.overlap is None else config.overlap
        # Drafts and models with caches of their own need the tokens on the host before the next step can be built.
        self._overlap = Overlap(self.runner, self.scheduler) if overlap and proposer is None and model.paged else None

    @property
    def has_work(self) -> bool:
        """Whether there are requests to compute or outputs to return."""
        return bool(self._requests or self._failed)

    def add(
        self,
        prompt_ids: Many[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        arrived_s: float | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt_ids: prompt token ids, at least one.
            params: sampling parameters.
            arrived_s: arrival time on the clock `time.perf_counter`, if earlier than this call; None = now.
        Returns:
            The request's number, as in `StepOutput`.
        Raises:
            RequestError: the prompt is empty, has unknown tokens, or has too few tokens for the requested scores;
                the request can never fit (the message says how many tokens fit); the schema or grammar is invalid;
                there are stop texts, but no tokenizer; or the adapter is unknown.
        """
        ids = self.check(prompt_ids, params)
        number = self._num_added
        self._num_added += 1
        decode = None if params.max_tokens == 0 or self._decode is None else self._decode(params.shown_tokens)
        sequence = Sequence(
            id=number,
            ids=ids,
            num_prompt=len(ids),
            params=params,
            adapter=params.adapter or self.config.adapter,
            limit=self.capacity if params.max_tokens is None else len(ids) + params.max_tokens,
            seed=derived_seed(self.config.seed, number) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            arrived=time.perf_counter() if arrived_s is None else arrived_s,
            text=None if decode is None else TextStream(decode, ids, params.stop_texts),
            history=TokenHistory(ids) if params.has_penalties else None,
            constraint=None if params.constraint is None else self.schemas.start(*params.constraint),
            scores=None if params.scoring is None else empty_scores(params.scoring, self.model.vocab_size),
        )
        self._requests[number] = sequence
        self.scheduler.add(sequence)
        return number

    def check(self, prompt_ids: Many[int], params: SamplingParams) -> list[int]:
        """Return the prompt's tokens as a list if `add` would accept the request; any thread may call this.

        Raises:
            RequestError: see `add`.
        """
        try:
            # operator.index takes numpy's integers and refuses floats, which int() would truncate.
            ids = [index(token) for token in prompt_ids]
        except TypeError as error:
            raise RequestError(f"the prompt is not a list of token ids ({error}); give integers") from None
        self._limits.check(len(ids), params.max_tokens)
        self.model.adapters.check(params.adapter)
        given = ids
        if params.scoring is not None:
            given = [*ids, *params.scoring.continuations]
            if params.scoring.num_tokens >= len(ids):
                raise RequestError(
                    f"cannot score {params.scoring.num_tokens} of {len(ids)} prompt tokens; score at most "
                    f"{len(ids) - 1}, because the first token has no context"
                )
        # On a GPU, an index out of range triggers a device assertion, after which every request of the process fails.
        if min(given) < 0 or max(given) >= self.model.vocab_size:
            wrong = min(given) if min(given) < 0 else max(given)
            raise RequestError(
                f"the request holds token {wrong}; the model's token ids are 0 to {self.model.vocab_size - 1}"
            )
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if outside := [token for token in tokens if not 0 <= token < self.model.vocab_size]:
                raise RequestError(
                    f"{name} holds token {outside[0]}; the model's token ids are 0 to {self.model.vocab_size - 1}"
                )
        if params.constraint is not None:
            self.schemas.start(*params.constraint)
        if params.stop_texts and self._decode is None:
            raise RequestError("stop texts need a tokenizer, and this engine has none; use stop_token_ids")
        return ids

    def cancel(self, request_id: int) -> StepOutput | None:
        """End a request now and free its pages; return None if the request has already ended."""
        sequence = self._requests.get(request_id)
        return None if sequence is None else self._end(sequence, "cancelled", (), "")

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Compute one batch.

        Returns:
            Outputs of the requests that got tokens or ended.
        Raises:
            Exception: any exception of the model. All running requests then end with "error", and their pages are
                freed; the next call returns their outputs. Waiting requests are not affected.
        """
        if self._failed:
            failed, self._failed = self._failed, []
            return failed
        outputs: list[StepOutput] = []
        try:
            if self._requests:
                with entered(self.model.device):
                    self._step(outputs)
            return outputs
        except BaseException:
            # Interrupts too: after half a step nobody knows which pages are valid, so all running requests end.
            if self._overlap is not None:
                self._overlap.forget()
            ended = [self._end(sequence, "error", (), "") for sequence in tuple(self.scheduler.running)]
            self._failed = [*outputs, *ended]
            raise

    def _step(self, outputs: list[StepOutput]) -> None:
        """Compute one batch; append outputs one by one, so that none is lost when a later part fails."""
        began = time.perf_counter()
        launched = None if self._overlap is None else self._overlap.next(self._requests)
        asked, work = 0, []
        if launched is None:
            asked = self._propose() if self._proposer is not None else 0
            work = self.scheduler.schedule()
            if self._overlap is not None and self._overlap.launch(work):
                launched = self._overlap.next(self._requests)
        if launched is not None:
            self._commit(launched, outputs)
            return
        chunks = [chunk_of(sequence, count) for sequence, count in work]
        drafts = [] if self.controller is None else [len(sequence.drafts) for sequence, _ in work if sequence.drafts]
        num_drawn = self._accept(work, chunks, self.runner.step(chunks), outputs)
        # Only steps without prompt tokens show what drafts gain. If drafts were requested but none proposed, the time
        # counts for neither kind of step, because it includes proposing.
        if self.controller is not None and (drafts or not asked) and num_drawn == sum(count for _, count in work):
            self.controller.timed(len(work), time.perf_counter() - began, drafts)

    def _propose(self) -> int:
        """Ask for drafts for the decoding sequences; return the number of drafts requested per sequence."""
        assert self._proposer is not None and self.controller is not None, "asked for without speculation"
        decoding = [sequence for sequence in self.scheduler.running if sequence.is_decoding]
        count = self.controller.choose(len(self.scheduler.running)) if decoding else 0
        if count:
            self._proposer.propose(decoding, count)
        return count

    def _accept(self, work: Work, chunks: list[ScheduledChunk], logits: Tensor, outputs: list[StepOutput]) -> int:
        """Score prompts, choose tokens and append them to their sequences; return the number of tokens chosen."""
        counts: list[int] = []
        rows: Rows = []
        is_scored = False
        for sequence, count in work:
            # Tokens to choose: none while known tokens are left, otherwise one more than there are drafts.
            ends = sequence.num_computed + count >= len(sequence.ids) < sequence.limit
            counts.append(1 + len(sequence.drafts) if ends else 0)
            for ahead in range(counts[-1]):
                rows.append((sequence, ahead))
            is_scored |= sequence.scores is not None
        if is_scored:
            collect_scores(logits, ((s, chunk) for (s, _), chunk in zip(work, chunks, strict=True)))
            if 0 < len(rows) < len(logits):
                logits = select_rows(logits, last_rows(chunks, counts))
        tokens = sample(logits, rows) if rows else []
        logprobs = log_probabilities(logits, rows, tokens)
        now = time.perf_counter()
        stops = list(accumulate(counts))
        drawn = [tokens[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
        chosen = [self._verified(sequence, new) for (sequence, _), new in zip(work, drawn, strict=True)]
        if self._proposer is not None:
            self._proposer.observe(chunks, [following_tokens(*each) for each in zip(work, chosen, strict=True)])
        for (sequence, count), new, stop, num_drawn in zip(work, chosen, stops, counts, strict=True):
            if num_drawn == 0:  # the prompt goes on, or nothing is to be chosen after it
                sequence.num_computed += count
                self.prefix.publish(sequence)
                if sequence.num_left == 0:
                    outputs.append(self._end(sequence, "length", (), ""))
                continue
            # The last chosen token has no keys and values yet; those of rejected drafts no longer count.
            sequence.num_computed = len(sequence.ids) + len(new) - 1
            outputs.append(self._append(sequence, new, now, logprobs[stop - num_drawn : stop] if logprobs else None))
        self._evict(sequence for sequence, _ in work)
        return len(rows)

    def _evict(self, sequences: Iterable[Sequence]) -> None:
        """Evict pages of each of these sequences that has not ended and whose next eviction is due."""
        if self.eviction is not None:
            alive = (sequence for sequence in sequences if sequence.id in self._requests)
            oldest = next(iter(self._requests), -1)
            self.eviction.evict(alive, self.scheduler.preempt_youngest, oldest)

    def _commit(self, step: InFlightStep, outputs: list[StepOutput]) -> None:
        """Append the tokens of a step launched in advance; skip sequences that have ended since."""
        tokens = step.read()
        now = time.perf_counter()
        for sequence, token in zip(step.sequences, tokens, strict=True):
            if sequence.id in self._requests:
                sequence.num_computed = len(sequence.ids)
                outputs.append(self._append(sequence, [token], now))
        self._evict(step.sequences)

    def _verified(self, sequence: Sequence, chosen: list[int]) -> list[int]:
        """Return the chosen tokens up to and including the first token that differs from the draft at its position."""
        if len(chosen) < 2:
            return chosen
        pairs = enumerate(zip(sequence.drafts, chosen, strict=False))
        accepted = next((number for number, (draft, token) in pairs if draft != token), len(sequence.drafts))
        if self.controller is not None:
            self.controller.accepted(len(sequence.drafts), accepted)
        sequence.drafts = []
        return chosen[: accepted + 1]

    def _append(
        self, sequence: Sequence, tokens: list[int], now: float, logprobs: list[TokenLogprob | None] | None = None
    ) -> StepOutput:
        """Append tokens until one of them ends the request; return the request's output of this step."""
        reason: FinishReason | None = None
        text, stopped, first, scored = "", False, len(sequence.ids), len(sequence.logprobs)
        for number, token in enumerate(tokens):
            sequence.ids.append(token)
            sequence.token_times.append(now)
            if sequence.history is not None:
                sequence.history.add(token)
            if sequence.constraint is not None:
                sequence.constraint.add(token)
            if logprobs is not None and (logprob := logprobs[number]) is not None:
                sequence.logprobs.append(logprob)
            if token in sequence.stop_ids:
                reason = "stop"
                break
            if sequence.text is not None:
                certain, stopped = sequence.text.push(token)
                text += certain
            if stopped or len(sequence.ids) >= sequence.limit:
                reason = "stop" if stopped else "length"
                break
        if reason is not None:  # tokens after the end were computed in vain
            sequence.num_computed = min(sequence.num_computed, len(sequence.ids))
        # Before `_end`, which releases the pages: only a page that somebody holds can be published.
        self.prefix.publish(sequence)
        added = tuple(sequence.ids[first:])
        if reason is not None:
            if sequence.text is not None and not stopped:
                rest, stopped = sequence.text.flush()
                text, reason = text + rest, "stop" if stopped else reason
            return replace(self._end(sequence, reason, added, text), logprobs=tuple(sequence.logprobs[scored:]))
        if text:
            sequence.deltas.append(text)
        own = tuple(sequence.logprobs[scored:])
        return StepOutput(request_id=sequence.id, token_ids=added, text=text, logprobs=own)

    def _end(self, sequence: Sequence, reason: FinishReason, added: tuple[int, ...], text: str) -> StepOutput:
        """Remove a request, free its pages and return its last output."""
        sequence.deltas.append(text)
        self.scheduler.remove(sequence)
        self._requests.pop(sequence.id, None)
        self._forget(sequence)
        completion = sequence.complete(reason, time.perf_counter())
        return StepOutput(request_id=sequence.id, token_ids=added, text=text, completion=completion)

    def _forget(self, sequence: Sequence) -> None:
        """Tell the model and the proposer that a sequence has lost its pages, by preemption or at its end."""
        self.model.forget(sequence.id)
        if self._proposer is not None:
            self._proposer.forget(sequence.id)

    def check_integrity(self) -> None:
        """Check that pages, queues and requests agree.

        Raises:
            AssertionError: an item is lost or appears twice.
        """
        self.scheduler.check_integrity()
        alive = {sequence.id for sequence in (*self.scheduler.running, *self.scheduler.waiting)}
        assert alive == self._requests.keys(), f"requests {self._requests.keys() ^ alive} are lost"
        if self._proposer is not None:
            self._proposer.check_integrity(alive)
