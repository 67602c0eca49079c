"""From news of prompts to the choices of an answer, whole or part by part: texts and conversations."""

from collections.abc import Sequence
from typing import Protocol

from quantkit.runtime.types import Completion, StepOutput
from quantkit.server.answers import Head, Json, TextLogprobs, chat_logprobs, joined
from quantkit.server.schemas import ChatRequest, CompletionRequest
from quantkit.server.vocabulary import Vocabulary


class Shape(Protocol):
    """How an answer is written. *Mutable*: a part may depend on those before it."""

    head: Head

    def first(self) -> list[Json]:
        """Choices that stand in front of the first token's."""
        ...

    def part(self, index: int, output: StepOutput) -> Json | None:
        """The choice of a prompt that a step added to; None where there is nothing to show."""
        ...

    def whole(self, index: int, completion: Completion) -> Json:
        """The choice of a prompt that has ended."""
        ...


class TextShape:
    """Completions of texts.

    Args:
        ask: the request.
        prompts: what stands in front of the answers with `echo`: text and tokens.
        vocabulary: of the model.
        model: the served name.
    """

    def __init__(
        self, ask: CompletionRequest, prompts: Sequence[tuple[str, Sequence[int]]], vocabulary: Vocabulary, model: str
    ) -> None:
        self.head = Head(kind="text_completion", model=model, prefix="cmpl")
        self._ask, self._prompts = ask, prompts
        self._logprobs: list[TextLogprobs] = []
        if ask.logprobs is not None:
            self._logprobs = [TextLogprobs(vocabulary, () if ask.echo else ids) for _, ids in prompts]

    def first(self) -> list[Json]:
        """The prompts, if they are to be repeated."""
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
        return _text(index, before + text, joined(parts) if parts else None, completion.finish_reason)


class ChatShape:
    """The answer to a conversation.

    Args:
        ask: the request.
        vocabulary: of the model.
        model: the served name.
    """

    def __init__(self, ask: ChatRequest, vocabulary: Vocabulary, model: str) -> None:
        self.head = Head(kind=f"chat.completion{'.chunk' * ask.stream}", model=model, prefix="chatcmpl")
        self._wants_logprobs, self._vocabulary = ask.logprobs, vocabulary

    def first(self) -> list[Json]:
        """Who speaks."""
        return [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]

    def part(self, index: int, output: StepOutput) -> Json | None:
        """See `Shape`."""
        reason = None if output.completion is None else output.completion.finish_reason
        logprobs = chat_logprobs(self._vocabulary, output.logprobs) if output.logprobs else None
        if not (output.text or reason or logprobs):
            return None
        delta = {"content": output.text} if output.text or logprobs else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, index: int, completion: Completion) -> Json:
        """See `Shape`."""
        logprobs = chat_logprobs(self._vocabulary, completion.logprobs or ()) if self._wants_logprobs else None
        message = {"role": "assistant", "content": completion.text}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}


def _text(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
