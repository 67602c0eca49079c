"""How to read the answer to a chat request, and the grammar of an answer that must call a tool."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.runtime.dialects.answer_parser import AnswerParser
from quantkit.runtime.dialects.dialect import Dialect
from quantkit.runtime.json_output import WHITESPACE
from quantkit.server.conversations import ChatRequest

# Name and arguments in a dialect's example call, and the example call for dialects whose arguments are not JSON.
_NAME, _ARGUMENTS = "weather", '{"city": "Oslo"}'
_BARE = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'

_VERBATIM = Dialect(name="verbatim", template=())


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """How to read an answer.

    Args:
        dialect: how the model writes calls and thinking.
        is_thinking: whether the prompt has already opened the thinking section.
        tools: names of the tools that the answer may call.
        forced: if the answer must call a tool, the parameters of each tool that it may call, keyed by name; else None.
        several: whether an answer that must call a tool may have several calls.
    """

    dialect: Dialect
    is_thinking: bool
    tools: tuple[str, ...]
    forced: Mapping[str, Any] | None
    several: bool

    @classmethod
    def of(cls, ask: ChatRequest, dialect: Dialect, prompt: str) -> "AnswerFormat":
        """Return the format of an answer.

        Args:
            ask: the request.
            dialect: dialect of the model.
            prompt: the conversation as text, rendered by the chat template.
        """
        # If the response format is JSON, the whole answer is JSON, without markers.
        is_json = ask.response_format is not None and ask.response_format.schema_text is not None
        return cls(
            dialect=_VERBATIM if is_json else dialect,
            is_thinking=not is_json and dialect.begins_thinking(prompt),
            tools=() if is_json else ask.tool_names,
            forced=ask.forced_tools,
            several=ask.parallel_tool_calls is True and ask.tool_choice == "required",
        )

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(
            self.dialect,
            is_thinking=self.is_thinking,
            tools=self.tools or None,
            bare=None if self.forced is None else True,
        )

    def marker_tokens(self, added: Mapping[str, int]) -> dict[str, int]:
        """Return the added tokens of a tokenizer that are markers in this format.

        Args:
            added: ids of added tokens, keyed by text.
        """
        texts = "".join(self.dialect.thinking)
        if self.tools:
            texts += self.dialect.example + (self.dialect.call or "").replace("\\", "")
        return {text: token for text, token in added.items() if text in texts and not text.isspace()}

    def grammar(self, tokens: Mapping[str, int]) -> str | None:
        """Return the llguidance grammar of an answer that must call a tool; None if no call is required.

        Several calls are possible only if each call has its own begin and end markers.

        Args:
            tokens: ids of tokens, keyed by text. The grammar refers to these tokens by id, not by their characters.
        """
        if self.forced is None:
            return None
        example = self.dialect.example if _ARGUMENTS in self.dialect.example else _BARE
        head, _, tail = example.partition(_ARGUMENTS)
        before, _, between = head.partition(_NAME)
        rules, choices = [], []
        for number, (name, parameters) in enumerate(self.forced.items()):
            schema = {**parameters, "type": "object", "x-guidance": WHITESPACE}
            rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
            choices.append(f"{_literal(name + between, tokens)} arguments_{number}")
        rules.append(f"call: {_literal(before, tokens)} ({' | '.join(choices)}) {_literal(tail, tokens)}")
        is_enclosed = example.startswith(self.dialect.begin or " ") and example.endswith(self.dialect.end or " ")
        answer = 'call ("\\n" call)*' if self.several and is_enclosed else "call"
        if self.is_thinking:
            end = self.dialect.thinking[1]
            by_text = f"thinking[suffix={json.dumps(end)}]: /(?s:.*)/"
            rules.append(f"thinking: /(?s:.*)/ <[{tokens[end]}]>" if end in tokens else by_text)
            answer = rf'thinking "\n\n" {answer}'
        return "\n".join([f"start: {answer}", *rules])


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return the Lark expression (llguidance's dialect) that matches exactly this text."""
    names = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part)
