"""What flows between the engine's parts: parameters, sequences, outputs, timings. Plain data, no tensors.

A sequence's life, drawn over its token ids (pages of 4, `num_computed` = 6, one token to feed):

    ids            [p0 p1 p2 p3 | p4 p5 g0]      p prompt, g generated
    in the cache    ------------------           positions 0 .. num_computed - 1
    to feed                         --           ids[num_computed:], one token when decoding
    drafts                              d0 d1    proposed, not part of ids until verified
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quantkit.errors import RequestError
from quantkit.results import RequestTiming

if TYPE_CHECKING:
    from quantkit.runtime.engine.detokenizer import TextStream
    from quantkit.runtime.sampling.penalties import TokenHistory

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. The defaults are greedy.

    Args:
        max_tokens: at most so many new tokens; None = until the context is full.
        temperature: 0 = greedy.
        top_k: sample among the k most likely tokens; None = all.
        top_p: sample among the most likely tokens that together have this probability.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: divides (multiplies, when negative) the logits of tokens seen in prompt or output.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted once for every time a token is in the output.
        seed: of this request's draws; None = derived from the engine's seed and the request's number.
        stop: texts that end the output; they and what follows are not part of it. One text or several.
        stop_token_ids: tokens that end the output, besides the model's own.
        ignore_eos: go on after the model's end token.
        logprobs: log-probabilities of the chosen and of this many most likely tokens; None = none.
    Raises:
        RequestError: a value of the wrong type or out of range.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, "None for as many as fit")
        _check_integer("top_k", self.top_k, 1, "None for all tokens")
        _check_integer("logprobs", self.logprobs, 0, "None for none")
        _check_integer("seed", self.seed, 0, "None to derive it")
        if self.seed is not None and self.seed >= 2**63:
            raise RequestError(f"seed is {self.seed}; it must be below 2**63")
        _check_number("temperature", self.temperature, "at least 0; 0 is greedy", lambda x: x >= 0)
        _check_number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        _check_number("repetition_penalty", self.repetition_penalty, "above 0; 1 is none", lambda x: x > 0)
        _check_number("presence_penalty", self.presence_penalty, "a finite number", lambda x: True)
        _check_number("frequency_penalty", self.frequency_penalty, "a finite number", lambda x: True)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; give True or False")
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one generated token, by the model itself: before penalties and temperature.

    Args:
        token_id: the chosen token.
        logprob: its natural log-probability.
        top: the most likely tokens, best first, with theirs.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished request.

    Args:
        prompt_token_ids: as given.
        token_ids: new tokens, an end token included.
        text: of the new tokens as it continues the prompt; empty when the engine has no tokenizer.
        finish_reason: "stop" (end token, stop token, stop text), "length", "cancelled" or "error".
        logprobs: one per new token, if asked for.
        timing: raw timestamps.
        num_preemptions: times it lost its pages and was computed again.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    timing: RequestTiming
    num_preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step added to one request.

    Args:
        request_id: as `Engine.add` returned it.
        token_ids: new tokens, in order.
        text: new text that no later token can change; may lag behind the tokens.
        completion: the whole request, when it has finished.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. Mutable; only the engine and its parts touch it.

    Args:
        id: stable number, also its age: smaller = arrived earlier.
        ids: prompt and generated tokens.
        num_prompt: tokens of the prompt.
        params: as given.
        limit: tokens at which it ends.
        seed: of its draws.
        stop_ids: tokens that end it.
        arrived: timestamp.
    """

    id: int
    ids: list[int]
    num_prompt: int
    params: SamplingParams
    limit: int
    seed: int
    stop_ids: frozenset[int]
    arrived: float
    text: TextStream | None = None
    history: TokenHistory | None = None
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    row: int = -1  # in page table and tail buffers; -1 while waiting
    tabled: int = 0  # pages already written to that row
    page_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    drafts: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def complete(self, reason: FinishReason, now: float) -> Completion:
        """The request as it ended at a time."""
        return Completion(
            prompt_token_ids=tuple(self.ids[: self.num_prompt]),
            token_ids=tuple(self.ids[self.num_prompt :]),
            text="".join(self.pieces),
            finish_reason=reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            timing=RequestTiming(
                request_id=self.id,
                prompt_tokens=self.num_prompt,
                arrived_s=self.arrived,
                token_s=tuple(self.token_times),
                finished_s=now,
                cached_tokens=self.num_cached,
            ),
            num_preemptions=self.num_preemptions,
        )


def _check_integer(name: str, value: Any, minimum: int, otherwise: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise RequestError(f"{name} is {value!r}; give an integer of at least {minimum}, or {otherwise}")


def _check_number(name: str, value: Any, wanted: str, valid: Any) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not valid(value):
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")


def _stop_texts(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if texts is None or not isinstance(texts, Iterable):
        raise RequestError(f"stop is {stop!r} ({type(stop).__name__}); give a text or a list of texts")
    found = tuple(texts)
    for text in found:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop holds {text!r} ({type(text).__name__}); every entry must be a text, not empty")
    return found


def _stop_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(f"stop_token_ids is {ids!r} ({type(ids).__name__}); give a list of token numbers")
    found = tuple(ids)
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"stop_token_ids holds {token!r} ({type(token).__name__}); every entry must be a number")
    return found
