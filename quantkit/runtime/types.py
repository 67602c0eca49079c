"""Input and output of the engine: parameters of a request, and its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quantkit.errors import RequestError
from quantkit.results import RequestTiming
from quantkit.safety.untrusted import shorten
from quantkit.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]

# A larger penalty would leave no choice, and dividing its logits by a low temperature would make them infinite.
_MOST_PENALTY = 1000.0
_MOST_BIAS = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScoring:
    """What a request scores: log-probabilities of given tokens, instead of generating tokens.

    Example: for the prompt [a, b, c, d], num_tokens 2 and continuations (x, y), the answer has the log-probabilities of
    c after ab, of d after abc, and of x and of y after abcd.

    Args:
        num_tokens: how many of the last prompt tokens to return log-probabilities for; must be less than the prompt
            length.
        continuations: tokens that might follow the prompt, each scored separately.
        top: number of likeliest tokens to return at each scored token.
        read_logits: called after each step with two arguments: the position of the step's first prompt token, and the
            logits after the step's prompt tokens, (t, V) float32 on the model's device. The next step may overwrite the
            logits. They are always computed anew: the prefix cache is neither read nor written. None = not requested.
        chunk_size: maximum number of prompt tokens per step; 1 uses the decode path, which reads all earlier tokens
            from the cache. None = as many as a step takes.
    Raises:
        RequestError: nothing is requested, or a number is out of range.
    """

    num_tokens: int = 0
    continuations: tuple[int, ...] = ()
    top: int = 0
    read_logits: Callable[[int, Tensor], None] | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        _check_integer("num_tokens", self.num_tokens, 0, "leave it out for none")
        _check_integer("top", self.top, 0, "leave it out for none")
        _check_integer("chunk_size", self.chunk_size, 1, "None for as many as fit into a step")
        if not (self.num_tokens or self.continuations or self.read_logits):
            raise RequestError(
                "the request asks for no scores; give num_tokens (how many of the last prompt tokens to score), "
                "continuations or read_logits"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose a request's tokens, and when to end it. Greedy by default. Fields with a flag are CLI options.

    Args:
        max_tokens: maximum number of new tokens; None = until the context is full; 0 only with `scoring`.
        top_k: keep only this many likeliest tokens; None = all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur in prompt or output.
        presence_penalty: subtracted from the logit of each token that is in the output.
        frequency_penalty: subtracted from a token's logit once for every time the token is in the output.
        seed: None = derived from the engine's seed and the request's number.
        stop: one stop text or several; the output ends before the first one.
        stop_token_ids: tokens that end the output, in addition to the model's own.
        logit_bias: numbers to add to logits, keyed by token id; -100 excludes a token in practice, 100 forces it.
        json_schema: JSON text of a schema that the output follows; `max_tokens` may still cut the output off.
        grammar: like `json_schema`, but a grammar in llguidance's dialect of Lark.
        shown_tokens: special tokens that are part of the text; other special tokens are left out of it.
        logprobs: return log-probabilities of the chosen token and of this many likeliest tokens; None = none.
        scoring: what to score in the prompt itself; None = nothing.
        adapter: name of the LoRA adapter to compute with; None = the engine's `adapter`, by default the base model.
    Raises:
        RequestError: a value has the wrong type or is out of range, or two values contradict each other.
    """

    max_tokens: int | None = setting(128, "Maximum number of new tokens.", flag="--max-tokens", minimum=1)
    temperature: float = setting(
        0.0, "Randomness of sampling; 0 always takes the likeliest token.", flag="--temperature"
    )
    top_k: int | None = setting(None, "Draw only from the k likeliest tokens.", flag="--top-k", kind=int)
    top_p: float = setting(
        1.0, "Draw only from the likeliest tokens that together have this probability.", flag="--top-p"
    )
    min_p: float = setting(
        0.0, "Draw only from tokens with at least this share of the likeliest token's probability.", flag="--min-p"
    )
    repetition_penalty: float = setting(
        1.0, "Divide the scores of used tokens by this; above 1 discourages repetition.", flag="--repetition-penalty"
    )
    presence_penalty: float = setting(0.0, "Subtract this from the scores of used tokens.", flag="--presence-penalty")
    frequency_penalty: float = 0.0
    seed: int | None = setting(None, "Seed of random sampling.", flag="--seed", minimum=0)
    stop: str | Iterable[str] = setting((), "End the text before this stop text; repeatable.", flag="--stop TEXT")
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = setting(False, "Continue after the end-of-text token.", flag="--ignore-eos")
    logit_bias: Mapping[int, float] | None = None
    json_schema: str | None = None
    grammar: str | None = None
    shown_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    scoring: PromptScoring | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1 if self.scoring is None else 0, "None for as many as fit")
        _check_integer("top_k", self.top_k, 1, "None for all tokens")
        _check_integer("logprobs", self.logprobs, 0, "None for no log-probabilities")
        _check_integer("seed", self.seed, 0, "None to derive it from the engine's seed")
        # The sampler packs seeds as signed 64-bit numbers.
        if self.seed is not None and self.seed >= 2**63:
            raise RequestError(f"seed is {self.seed}; it must be below 2**63")
        _check_number("temperature", self.temperature, "at least 0; 0 is greedy", lambda x: x >= 0)
        _check_number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        most, least = _MOST_PENALTY, 1 / _MOST_PENALTY
        repetition = f"from {least:g} to {most:g}; 1 is no penalty"
        _check_number("repetition_penalty", self.repetition_penalty, repetition, lambda x: least <= x <= most)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), f"from {-most:g} to {most:g}", lambda x: abs(x) <= most)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; give True or False")
        if self.json_schema is not None and self.grammar is not None:
            raise RequestError("json_schema and grammar are both given; give only one of them")
        if (constraint := self.constraint) is not None and self.ignore_eos:
            what = "JSON" if constraint[0] == "json_schema" else "text of the grammar"
            raise RequestError(
                f"ignore_eos does not work with {constraint[0]}, whose output ends with the {what}; leave one of them "
                "out"
            )
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        texts = _listed("stop", texts, "a text or a list of texts", _is_text, "a non-empty text")
        ids = _listed("stop_token_ids", self.stop_token_ids, "a list of token ids", _is_integer, "an integer")
        # Copies: a caller's list could still be changed after it was checked.
        object.__setattr__(self, "stop", texts)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Name and text of `json_schema` or `grammar`, whichever is given; None = neither is given."""
        if self.json_schema is not None:
            return "json_schema", self.json_schema
        return None if self.grammar is None else ("grammar", self.grammar)

    @property
    def has_penalties(self) -> bool:
        """Whether the request has a penalty that changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one generated token, before penalties and temperature.

    Args:
        token_id: the chosen token.
        logprob: its natural log-probability.
        top: the likeliest tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredText:
    """A text whose last tokens are scored; see `LLM.score_tokens`.

    Args:
        ids: token ids of context and continuation, at least two.
        num_scored: number of scored tokens at the end; at least one, and fewer than len(ids).
    """

    ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """Answer to a `PromptScoring`.

    Args:
        logprobs: (num_tokens + len(continuations),) float32 on the CPU, the log-probability of each token given all
            tokens before it.
        greedy: bool, of the same shape: whether the token was the likeliest.
        top: the `top` likeliest tokens at each scored token, and their log-probabilities, both of shape (num_tokens +
            len(continuations), top); None = not requested.
    """

    logprobs: Tensor
    greedy: Tensor
    top: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Result of a request.

    Args:
        prompt_token_ids: prompt as given.
        token_ids: new tokens, including the end token if there was one.
        text: text of the new tokens as it continues the prompt; empty if the engine has no tokenizer.
        finish_reason: "stop" (end token, stop token, stop text), "length", "cancelled" or "error".
        logprobs: one per new token, if requested.
        scores: scores of prompt tokens, if requested.
        timing: raw timestamps.
        num_preemptions: number of times the request was preempted and recomputed.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    timing: RequestTiming
    num_preemptions: int
    scores: PromptScores | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Tokens and text that one step added to one request.

    Args:
        request_id: number returned by `Engine.add`.
        token_ids: new tokens, in order.
        text: new text that no later token can change; may lag behind the tokens.
        logprobs: log-probabilities of the new tokens, if requested.
        completion: the full result, once the request has finished.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None


def _check_integer(name: str, value: Any, minimum: int, otherwise: str) -> None:
    if value is not None and not (_is_integer(value) and value >= minimum):
        raise RequestError(f"{name} is {value!r}; give an integer of at least {minimum}, or {otherwise}")


def _check_number(name: str, value: Any, condition: str, valid: Callable[[float], bool]) -> None:
    # The comparison also refuses NaN, and integers that no float can hold.
    good = (_is_integer(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max
    if not good or not valid(value):
        raise RequestError(f"{name} is {shorten(value)}; it must be {condition}")


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):
        raise RequestError(
            f"logit_bias is {shorten(bias)} ({type(bias).__name__}); give a mapping from token ids to numbers"
        )
    for token, value in bias.items():
        if not _is_integer(token):
            raise RequestError(f"logit_bias holds the key {shorten(token)}; every key must be a token id")
        condition = f"from {-_MOST_BIAS:g} to {_MOST_BIAS:g}"
        _check_number(f"logit_bias of token {token}", value, condition, lambda x: abs(x) <= _MOST_BIAS)


def _listed(name: str, value: Any, expected: str, valid: Callable[[Any], bool], every: str) -> tuple[Any, ...]:
    # A text is iterable too, and each of its characters would pass for an entry.
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r} ({type(value).__name__}); give {expected}")
    items = tuple(value)
    for item in items:
        if not valid(item):
            raise RequestError(f"{name} holds {item!r} ({type(item).__name__}); every entry must be {every}")
    return items


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
