"""A dialect: the markers around tool calls and thinking, and how a call is written. Torch-free.

A dialect lists texts, and fits a model if all of them occur in the model's chat template. If several dialects fit, the
dialect with the longest texts is used. Markers are those of the chat templates; vLLM's and SGLang's tool parsers look
for the same markers.
"""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import DataError
from quantkit.safety.untrusted import parse_object, parse_yaml, read_text

# Small models often write only the JSON of a call, perhaps in a block of code, instead of their dialect's form.
_BARE = re.compile(r'\s*(?:```(?:json)?\s*)?(\{\s*"name"\s*:.*?"(?:arguments|parameters)".*?)(?:```)?\s*', re.DOTALL)

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How a family of models writes tool calls and thinking.

    Args:
        name: name of the YAML file without its suffix.
        template: texts that all occur in a chat template of this dialect.
        start: marker before the first call of an answer; empty = the dialect has no tool calls.
        begin, end: markers around one call; empty `end` = a call extends to the next call or the end of the answer.
        stop: marker after the last call; empty = none.
        call: regular expression for a call, with the groups `name` and `arguments`; None = a call is a JSON object with
            these keys, or a list of such objects.
        parameter: regular expression for one argument, with the groups `name` and `value`; None = the arguments are a
            JSON object.
        thinking: markers around thinking; two empty texts = none.
        example: the call weather(city="Oslo") in this dialect, for tests.
    """

    name: str
    template: tuple[str, ...]
    start: str = ""
    begin: str = ""
    end: str = ""
    stop: str = ""
    call: str | None = None
    parameter: str | None = None
    thinking: tuple[str, str] = ("", "")
    example: str = ""

    def calls(self, text: str) -> list[Call | None]:
        """Return the tool calls of an answer, with None for each malformed call.

        An answer without markers counts as a call if it consists only of a call's JSON.

        Args:
            text: the answer, including special tokens.
        """
        if bare := self._bare(text):
            return self.read_json(bare[1])
        return [call for body in self._bodies(text) for call in ([None] if body is None else self.read(body))]

    def call_spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each tool call of an answer begins and ends; the first span includes the marker before all
        calls.
        """
        if bare := self._bare(text):
            return [(len(text) - len(text.lstrip()), bare.end(1))]
        pattern = re.escape(self.begin) + ".*?" + (re.escape(self.end) or "$")
        spans = [match.span() for match in re.finditer(pattern, text, re.DOTALL)] if self.begin else []
        return [(max(0, text.find(self.start)), spans[0][1]), *spans[1:]] if spans else []

    def _bare(self, text: str) -> re.Match[str] | None:
        # A marker that is itself the beginning of the JSON may occur once.
        most = 1 if self.start.startswith("{") else 0
        return _BARE.fullmatch(text) if self.begin and text.count(self.start) <= most else None

    def answer(self, text: str, *, is_thinking: bool = False) -> str:
        """Return the text after the thinking; an empty text if the thinking never ends.

        Args:
            text: an answer.
            is_thinking: whether the prompt ends with the marker that begins the thinking.
        """
        begin, end = self.thinking
        if end and end in text:
            return text.partition(end)[2]
        return "" if begin and (is_thinking or text.lstrip().startswith(begin)) else text

    def begins_thinking(self, prompt: str) -> bool:
        """Whether a prompt ends with the marker that begins the thinking."""
        return bool(self.thinking[0]) and prompt.rstrip().endswith(self.thinking[0])

    def _bodies(self, text: str) -> Iterator[str | None]:
        """Yield the text between the markers of each call; None if the end marker is missing."""
        for rest in text.split(self.begin)[1:] if self.begin else ():
            body, end, _ = rest.partition(self.end) if self.end else (rest, " ", "")
            # A marker that is itself the beginning of the JSON belongs to the JSON.
            yield (self.begin if self.begin.startswith("{") else "") + body if end else None

    def read_json(self, body: str) -> list[Call | None]:
        """Return the calls in a JSON object or list, with None for each malformed call."""
        try:
            # `parse_object`, which has limits, reads only objects, so the calls are wrapped in one.
            read = parse_object(f'{{"calls": {body}}}', self.name, DataError)
            calls = read["calls"] if isinstance(read["calls"], list) else [read["calls"]]
            return [_json_call(each) for each in calls if len(read) == 1] or [None]
        except DataError:
            return [None]

    def read(self, body: str) -> list[Call | None]:
        """Return the calls in the text between the markers of a call, with None for each malformed call."""
        if self.call is None:
            return self.read_json(body)
        try:
            match = re.fullmatch(self.call, body.strip(), re.DOTALL)
            if match is None:
                return [None]
            return [(match["name"].strip(), self._arguments(match["arguments"]))]
        except DataError:
            return [None]

    def _arguments(self, text: str) -> dict[str, Any]:
        if self.parameter is None:
            return parse_object(text, self.name, DataError)
        given = re.finditer(self.parameter, text, re.DOTALL)
        if re.sub(self.parameter, "", text, flags=re.DOTALL).strip():
            raise DataError(f"{self.name}: there is text between the arguments that is no argument")
        return {each["name"].strip(): _value(each["value"]) for each in given}


def _json_call(read: Any) -> Call | None:
    """Return name and arguments of `{"name": ..., "arguments" or "parameters": {...}}`.

    The arguments may also be a string of JSON. Return None if the call is malformed.
    """
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return None
    given = read.get("arguments", read.get("parameters", {}))
    if isinstance(given, str):
        given = parse_object(given, "arguments", DataError)
    return (read["name"], given) if isinstance(given, dict) else None


def _value(text: str) -> Any:
    """Return the value of a parameter between tags: parsed if it is JSON, otherwise the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@functools.cache
def dialects() -> dict[str, Dialect]:
    """Return all shipped dialects, keyed by name."""
    return {path.stem: _load(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_dialect(template: str | None) -> Dialect:
    """Return the dialect of a chat template; `plain` if no other dialect fits."""
    fitting = [each for each in dialects().values() if all(text in (template or "") for text in each.template)]
    return max(fitting, key=lambda each: sum(map(len, each.template)))


def _load(path: Path) -> Dialect:
    data: dict[str, Any] = parse_yaml(read_text(path, DataError), path.name, DataError)
    template, markers, thinking = (data.pop(key, {}) for key in ("template", "tool_call", "thinking"))
    return Dialect(
        name=path.stem,
        template=tuple(template),
        thinking=(thinking.get("begin", ""), thinking.get("end", "")),
        **{"start": markers.get("begin", ""), **markers},
        **data,
    )
