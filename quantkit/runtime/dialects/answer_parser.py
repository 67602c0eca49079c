"""Separate an answer into thinking, tool calls and content while it is generated. Torch-free.

A call is reported when it is complete, because text that only looks like a call must stay text. The parser holds back
only text whose meaning depends on later text: the beginning of a marker, an open call, and whitespace that may be next
to a call. The result does not depend on how the text is cut into pieces.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import regex

from quantkit.runtime.dialects.dialect import Call, Dialect

_QUOTE = re.compile(r'\\.|(")', re.DOTALL)
_JSON_MARKS = re.compile(r'["\\{}\[\]]')
_FENCE = regex.compile(r"\s*```")


@dataclass(kw_only=True, slots=True)
class AnswerParts:
    """Thinking, content and tool calls that a piece of text adds to an answer. *Mutable* while the parser fills it.

    Args:
        thinking: text of the thinking.
        content: text of the answer proper.
        calls: complete tool calls.
    """

    thinking: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __add__(self, other: "AnswerParts") -> "AnswerParts":
        return AnswerParts(
            thinking=self.thinking + other.thinking,
            content=self.content + other.content,
            calls=self.calls + other.calls,
        )


class AnswerParser:
    """Parser of one answer. *Mutable*.

    Whitespace around the thinking, between content and a call, and between calls is dropped. Only the beginning of an
    answer can be thinking. JSON without markers counts as a call if it is the beginning of the answer (in a block of
    code or not) and names one of the tools.

    Args:
        dialect: how the model writes calls and thinking.
        is_thinking: whether the prompt ends with the marker that begins the thinking.
        tools: names of the tools; None = calls are returned as text.
        bare: whether JSON without markers can be a call; None = it can if the dialect has markers for calls.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        is_thinking: bool = False,
        tools: Collection[str] | None = None,
        bare: bool | None = None,
    ) -> None:
        self._dialect = dialect
        self._tools = frozenset(tools or ())
        self._markers = tuple(filter(None, {dialect.start, dialect.begin})) if tools is not None else ()
        self._bare_head: Any = None
        if self._tools and (bool(dialect.begin) if bare is None else bare):
            names = "|".join(map(regex.escape, sorted(self._tools)))
            self._bare_head = regex.compile(rf'\s*(?P<fence>```(?:json)?\s*)?\{{\s*"name"\s*:\s*"(?:{names})"')
        self._reads_calls = bool(self._markers) or self._bare_head is not None
        self._held = ""
        self._spaces = ""  # whitespace that may be next to a call, or at an edge of the thinking
        self._parts = AnswerParts()
        self._num_calls, self._has_thoughts = 0, False
        self._has_thinking, self._has_content = is_thinking and bool(dialect.thinking[1]), False
        self._state: Callable[[bool], bool] = self._read_thinking if self._has_thinking else self._read_beginning
        self._maybe_bare = self._bare_head is not None
        self._in_fence = False  # a block of code was opened before a call
        self._json_end: _JsonEnd | None = None

    def push(self, text: str) -> AnswerParts:
        """Add text to the answer; return the new parts that no later text can change."""
        self._held += text
        return self._read(is_last=False)

    def end(self) -> AnswerParts:
        """Return the remaining parts at the end of the answer; an incomplete call becomes content."""
        parts = self._read(is_last=True)
        if not self._num_calls and (self._has_content or not self._has_thinking):
            parts.content += self._spaces
        self._spaces = ""
        return parts

    def parse(self, text: str) -> AnswerParts:
        """Return the parts of a whole answer."""
        return self.push(text) + self.end()

    def _read(self, is_last: bool) -> AnswerParts:
        self._parts = AnswerParts()
        while self._state(is_last):
            pass
        return self._parts

    # Each state reads from the beginning of the held text. It returns whether to go on with the next state; False means
    # that more text is needed.

    def _read_beginning(self, is_last: bool) -> bool:
        """Choose the next state: thinking if the answer begins with the marker of thinking, otherwise content."""
        marker, text = self._dialect.thinking[0], self._held.lstrip()
        if marker and marker.startswith(text[: len(marker)]):
            if len(text) >= len(marker):
                self._held, self._has_thinking = text[len(marker) :], True
                self._state = self._read_thinking
                return True
            if not is_last:
                return False
        self._state = self._read_content
        return True

    def _read_thinking(self, is_last: bool) -> bool:
        text, marker, rest = self._held.partition(self._dialect.thinking[1])
        if not marker and not is_last:
            size = overlap(text, (self._dialect.thinking[1],))
            text, rest = text[: len(text) - size], text[len(text) - size :]
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = "" if marker else text[len(kept) :]
        self._parts.thinking += kept if self._has_thoughts else kept.lstrip()
        self._has_thoughts |= bool(kept)
        self._held = rest
        if marker:
            self._state = self._read_content
        return bool(marker)

    def _read_content(self, is_last: bool) -> bool:
        if self._maybe_bare and (goes_on := self._read_bare(is_last)) is not None:
            return goes_on
        markers = self._markers + ((self._dialect.stop,) if self._num_calls and self._dialect.stop else ())
        starts = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if not starts:
            size = 0 if is_last else overlap(self._held, markers)
            self._say(len(self._held) - size)
            return False
        at, marker = min(starts)
        self._say(at)
        if marker == self._dialect.stop:
            self._held = self._held[len(marker) :]
        else:
            self._json_end = None
            self._state = self._read_call
        return True

    def _read_bare(self, is_last: bool) -> bool | None:
        """Read a call that has no markers; return None if the held text does not begin with a call."""
        if self._in_fence and (match := _FENCE.match(self._held, partial=True)):
            if match.partial:
                return None if is_last else False
            self._held, self._in_fence = self._held[match.end() :], False
            return True
        match = self._bare_head.match(self._held, partial=True)
        if match is not None and match.partial and not is_last:
            return False
        if match is not None and not match.partial:
            begin = self._held.index("{")
            self._json_end = self._json_end or _JsonEnd()
            end = self._json_end.find(self._held[begin:])
            if end is None and not is_last:
                return False
            body = self._held[begin : begin + (end or 0)]
            if '"arguments"' in body or '"parameters"' in body:
                self._in_fence |= match["fence"] is not None
                if self._call(self._dialect.read_json(body), begin + len(body)):
                    return True
        self._maybe_bare = False
        return None

    def _read_call(self, is_last: bool) -> bool:
        """Read a call that begins with its markers."""
        start, begin, end = self._dialect.start, self._dialect.begin, self._dialect.end
        at = 0
        if start != begin and self._held.startswith(start):
            at = len(start) + _num_spaces(self._held[len(start) :])
            if not self._held.startswith(begin, at):
                if begin.startswith(self._held[at:]) and not is_last:
                    return False
                return self._no_call(len(start))
        # A marker that is itself the beginning of the JSON belongs to the JSON.
        first = at if begin.startswith("{") else at + len(begin)
        body = self._held[first:]
        if self._dialect.call is None and body.strip() and body.lstrip()[0] not in "[{":
            return self._no_call(at + len(begin))
        sizes, is_complete = self._sizes_of(body, is_last)
        for size in sizes:
            calls = self._dialect.read(body[:size])
            if begin.startswith("{") and not all(call and call[0] in self._tools for call in calls):
                calls = []
            if self._call(calls, first + size + (len(end) if body.startswith(end, size) else 0)):
                return True
        if is_complete or is_last:
            return self._no_call(at + len(begin))
        return False

    def _sizes_of(self, body: str, is_last: bool) -> tuple[list[int], bool]:
        """Return the possible lengths of a call, and whether they are final even if more text follows.

        Args:
            body: text after the marker of a call.
            is_last: whether no more text follows.
        """
        dialect = self._dialect
        if not dialect.end:
            opening = re.search(r"\{" if dialect.call else r"[\[{]", body)
            if opening is None:
                return [], False
            self._json_end = self._json_end or _JsonEnd()
            size = self._json_end.find(body[opening.start() :])
            return ([], False) if size is None else ([opening.start() + size], True)
        sizes, at = [], body.find(dialect.end)
        while at >= 0:
            sizes.append(at)
            # The marker may also be part of a string in the JSON.
            if dialect.parameter is not None or not _is_in_text(body[:at]):
                return sizes, True
            at = body.find(dialect.end, at + 1)
        # Small models may end the answer without the last marker, but only JSON shows that nothing is missing.
        if is_last and dialect.parameter is None:
            sizes.append(len(body))
        return sizes, False

    def _call(self, calls: list[Call | None], size: int) -> bool:
        """Report the calls in the first `size` held characters; return False if there is none or one is malformed."""
        good = [call for call in calls if call is not None]
        if not good or len(good) < len(calls):
            return False
        self._parts.calls += good
        self._num_calls += len(good)
        self._held = self._held[size:]
        self._maybe_bare = self._bare_head is not None and not self._has_content
        self._json_end = None
        self._state = self._read_content
        return True

    def _no_call(self, size: int) -> bool:
        """Report the first `size` held characters, which include a marker, as content."""
        self._say(size)
        self._maybe_bare = False
        self._state = self._read_content
        return True

    def _say(self, size: int) -> None:
        """Report the first `size` held characters as content."""
        text, self._held = self._spaces + self._held[:size], self._held[size:]
        kept = text.rstrip() if self._reads_calls else text
        self._spaces = text[len(kept) :]
        if not self._has_content and (self._num_calls or self._has_thinking):
            kept = kept.lstrip()
        self._has_content |= bool(kept)
        self._maybe_bare &= not kept
        self._parts.content += kept


class _JsonEnd:
    """Finds the end of a JSON object or list in a growing text. *Mutable*: looks at each character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_text = False

    def find(self, text: str) -> int | None:
        """Return where the JSON ends; None if its end is not in the text.

        Args:
            text: text that begins with the JSON. Later calls of this method must pass the same text, possibly longer.
        """
        while match := _JSON_MARKS.search(text, self._at):
            mark, at = match[0], match.end()
            if self._in_text and mark == "\\":
                if at == len(text):  # the escaped character is still to come
                    break
                at += 1
            elif mark == '"':
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += 1 if mark in "{[" else -1
            self._at = at
            if self._depth <= 0 and mark in "}]":
                return at
        return None


def overlap(text: str, markers: Collection[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    sizes = range(longest, 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in markers)), 0)


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip())


def _is_in_text(json: str) -> bool:
    """Whether a text, which is the beginning of some JSON, ends inside a string."""
    return sum(match[1] is not None for match in _QUOTE.finditer(json)) % 2 == 1
