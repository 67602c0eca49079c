"""Answers in OpenAI's format, as plain dictionaries: one is built for every streamed token, so this must be fast."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from quantkit.runtime.detokenizer import Detokenizer, decoder
from quantkit.runtime.dialects.answer_parser import AnswerParser, AnswerParts
from quantkit.runtime.dialects.dialect import Call
from quantkit.runtime.types import Completion, StepOutput, TokenLogprob
from quantkit.server.conversations import ChatRequest
from quantkit.server.schemas import CompletionRequest


class Vocabulary:
    """Converts tokens to text, all together or one by one.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text_of = decoder(tokenizer)
        # A token that is decoded alone may lose its leading space. So each token is decoded after this one.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._shown_before = len(self._whole(self._before))
        self.piece = lru_cache(1 << 16)(self._piece)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._text_of(list(ids))

    def stream(self, context: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the tokens that follow the tokens `context`."""
        return Detokenizer(self._text_of, list(context))

    def _whole(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _piece(self, token: int) -> str:
        """Return the text of one token, or its name in the vocabulary if it holds only a part of a character."""
        text = self._whole([*self._before, token])[self._shown_before :]
        if "\ufffd" in text or not text:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        return text


Json = dict[str, Any]

# Made once: `json.dumps` with options makes an encoder per call. No spaces: these bytes are written for every token.
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Fields that every part of an answer repeats.

    Args:
        kind: `text_completion`, `chat.completion` or `chat.completion.chunk`.
        model: name of the served model.
        prefix: beginning of the answer's id, such as `cmpl`.
    """

    kind: str
    model: str
    prefix: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[Json], **further: Any) -> Json:
        """Return an answer with the fields of this head, the given choices and any further fields."""
        own = {"id": f"{self.prefix}-{self.id}", "object": self.kind, "created": self.created, "model": self.model}
        return {**own, "choices": choices, **further}

    def frame(self, **further: Any) -> tuple[bytes, bytes]:
        """Return the bytes before and after the choice of a stream event with a single choice, see `framed`."""
        # No string can contain this pattern, because quotes inside strings are escaped.
        before, choices, behind = event(self.around([{}], **further)).partition(b'"choices":[{}]')
        return before + choices[:-3], choices[-1:] + behind


def usage(completions: Mapping[int, Completion], num_samples: int, new_tokens: int | None = None) -> Json:
    """Return the token counts of a request.

    Args:
        completions: completions of all prompts of the request, keyed by index.
        num_samples: number of completions of each prompt; the prompt's tokens count once.
        new_tokens: number of new tokens to report; None = all.
    """
    first = [each for index, each in completions.items() if index % num_samples == 0]
    prompt = sum(len(each.prompt_token_ids) for each in first)
    new = sum(len(each.token_ids) for each in completions.values()) if new_tokens is None else new_tokens
    cached = sum(each.timing.cached_tokens for each in first)
    return {**counts(prompt, new), "prompt_tokens_details": {"cached_tokens": cached}}


def counts(prompt_tokens: int, new_tokens: int) -> Json:
    """Return the token counts of a request so far, in OpenAI's format."""
    total = prompt_tokens + new_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}


def error(text: str, *, kind: str = "invalid_request_error", field: str | None = None, code: str | None = None) -> Json:
    """Return the body of an error response; `text` says why there is no answer."""
    return {"error": {"message": text, "type": kind, "param": field, "code": code}}


def event(data: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _written(data).encode() + b"\n\n"


def framed(frame: tuple[bytes, bytes], choice: Json) -> bytes:
    """Return a server-sent event with one choice; the same bytes as `event(head.around([choice]))`, but faster."""
    return frame[0] + _written(choice).encode() + frame[1]


class TextLogprobs:
    """Builds the log-probabilities of a text completion that is sent in parts. *Mutable*: tracks the position.

    Args:
        vocabulary: vocabulary of the model.
        context: tokens before the text.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._stream, self._offset = vocabulary.stream(context), 0

    def _part(self, tokens: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Any]) -> Json:
        """Return OpenAI's `logprobs` object for the next tokens of the text.

        The first prompt token has no log-probability and no top tokens: both are None.
        """
        piece, offsets = self._vocabulary.piece, []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        return {
            "tokens": [piece(token) for token in tokens],
            "token_logprobs": list(logprobs),
            # Reversed, so that of two tokens with the same text the likelier one is kept.
            "top_logprobs": [None if top is None else {piece(t): value for t, value in reversed(top)} for top in tops],
            "text_offset": offsets,
        }

    def of_new(self, logprobs: Sequence[TokenLogprob]) -> Json:
        """Return OpenAI's `logprobs` object for generated tokens."""
        tokens = [each.token_id for each in logprobs]
        return self._part(tokens, [each.logprob for each in logprobs], [each.top for each in logprobs])

    def of_prompt(self, completion: Completion) -> Json:
        """Return OpenAI's `logprobs` object for the tokens of the prompt, of which the first has no log-probability."""
        ids, scores = completion.prompt_token_ids, completion.scores
        values: list[float] = [] if scores is None else scores.logprobs.tolist()
        tops: list[Any] = [()] * len(values)
        if scores is not None and scores.top is not None:
            pairs = zip(scores.top[0].tolist(), scores.top[1].tolist(), strict=True)
            tops = [list(zip(*pair, strict=True)) for pair in pairs]
        return self._part(ids, [None, *values], [None, *tops])


def chat_logprobs(vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob]) -> Json:
    """Return the log-probabilities of a chat answer's tokens."""

    def entry(token: int, value: float) -> Json:
        text = vocabulary.piece(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {
        "content": [
            {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*pair) for pair in each.top]}
            for each in logprobs
        ]
    }


class Shape(Protocol):
    """Format of an answer. *Mutable*: a part may depend on earlier parts."""

    head: Head
    num_samples: int

    def first(self) -> list[Json]:
        """Return the choices to send before the first token."""

    def part(self, index: int, output: StepOutput) -> Json | None:
        """Return a choice with what one step added to the answer of this index; None if there is nothing to send."""

    def whole(self, index: int, completion: Completion) -> Json:
        """Return the choice that contains a finished answer as a whole."""


class TextShape:
    """Format of text completions.

    Args:
        ask: the request.
        prompts: for each answer, text and tokens of its prompt; the text is empty if the request does not set `echo`.
        vocabulary: vocabulary of the model.
        model: name of the served model.
    """

    def __init__(
        self, ask: CompletionRequest, prompts: Sequence[tuple[str, Sequence[int]]], vocabulary: Vocabulary, model: str
    ) -> None:
        self.head, self.num_samples = Head(kind="text_completion", model=model, prefix="cmpl"), ask.n
        self._ask, self._prompts = ask, prompts
        self._logprobs: list[TextLogprobs] = []
        if ask.logprobs is not None:
            self._logprobs = [TextLogprobs(vocabulary, () if ask.echo else ids) for _, ids in prompts]

    def first(self) -> list[Json]:
        """Return choices with the prompts if the request sets `echo`, otherwise none."""
        return [_text(index, text) for index, (text, _) in enumerate(self._prompts)] if self._ask.echo else []

    def part(self, index: int, output: StepOutput) -> Json | None:
        """See `Shape`."""
        reason = None if output.completion is None else output.completion.finish_reason
        logprobs = self._logprobs[index].of_new(output.logprobs) if self._logprobs and output.logprobs else None
        text = output.text if self._ask.max_tokens != 0 else ""
        return _text(index, text, logprobs, reason) if text or reason or logprobs else None

    def whole(self, index: int, completion: Completion) -> Json:
        """See `Shape`."""
        parts: list[Json] = []
        if self._logprobs:
            source = self._logprobs[index]
            parts = [source.of_prompt(completion)] if self._ask.echo else []
            parts.append(source.of_new(completion.logprobs or ()))
        text = completion.text if self._ask.max_tokens != 0 else ""
        before = self._prompts[index][0] if self._ask.echo else ""
        logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]} if parts else None
        return _text(index, before + text, logprobs, completion.finish_reason)


class ChatShape:
    """Format of a chat answer.

    Args:
        ask: the request.
        parsers: parser of each of the `n` answers.
        vocabulary: vocabulary of the model.
        model: name of the served model.
    """

    def __init__(self, ask: ChatRequest, parsers: Sequence[AnswerParser], vocabulary: Vocabulary, model: str) -> None:
        self.head = Head(kind=f"chat.completion{'.chunk' * ask.stream}", model=model, prefix="chatcmpl")
        self.num_samples = ask.n
        self._wants_logprobs, self._vocabulary = ask.logprobs, vocabulary
        self._parsers, self._num_calls = parsers, [0] * ask.n
        self._most_calls = 1 if ask.parallel_tool_calls is False else None

    def first(self) -> list[Json]:
        """Return one choice per answer, with the speaker's role."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self.num_samples)
        ]

    def part(self, index: int, output: StepOutput) -> Json | None:
        """See `Shape`."""
        parser = self._parsers[index]
        parts = parser.push(output.text)
        if output.completion is not None:
            parts += parser.end()
        first = self._num_calls[index]
        delta = self._fields(index, parts)
        for number, call in enumerate(delta.get("tool_calls", ()), first):
            call["index"] = number
        logprobs = chat_logprobs(self._vocabulary, output.logprobs) if output.logprobs else None
        reason = self._reason(index, output.completion)
        if not (delta or reason or logprobs):
            return None
        if logprobs and not delta:
            delta = {"content": ""}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, index: int, completion: Completion) -> Json:
        """See `Shape`."""
        logprobs = chat_logprobs(self._vocabulary, completion.logprobs or ()) if self._wants_logprobs else None
        fields = self._fields(index, self._parsers[index].parse(completion.text))
        message = {"role": "assistant", "content": None if "tool_calls" in fields else "", **fields}
        reason = self._reason(index, completion)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _fields(self, index: int, parts: AnswerParts) -> Json:
        """Return the parts of an answer as fields of a message, without empty parts."""
        calls = parts.calls if self._most_calls is None else parts.calls[: self._most_calls - self._num_calls[index]]
        self._num_calls[index] += len(calls)
        named = {
            "reasoning_content": parts.thinking,
            "content": parts.content,
            "tool_calls": [_tool_call(call) for call in calls],
        }
        return {name: value for name, value in named.items() if value}

    def _reason(self, index: int, completion: Completion | None) -> str | None:
        if completion is None:
            return None
        has_called = completion.finish_reason == "stop" and self._num_calls[index]
        return "tool_calls" if has_called else completion.finish_reason


def _tool_call(call: Call) -> Json:
    """Return a tool call with a new id: 9 letters and digits, because Mistral's templates accept no other ids."""
    name, arguments = call
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _text(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
