"""Bodies of chat requests, and the format of an answer: how to read it, and its grammar if it must call a tool.

Source: https://platform.openai.com/docs/api-reference/chat
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quantkit.errors import RequestError
from quantkit.runtime.dialects.answer_parser import AnswerParser
from quantkit.runtime.dialects.dialect import Dialect
from quantkit.runtime.json_output import WHITESPACE
from quantkit.runtime.types import SamplingParams
from quantkit.safety.untrusted import parse_object
from quantkit.server.schemas import MOST_LOGPROBS, Refused, Sampling, Schema, Text

MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, MOST_CALLS = 4096, 1024, 1024, 1024

# Name and arguments in a dialect's example call, and the example call for dialects whose arguments are not JSON.
_NAME, _ARGUMENTS = "weather", '{"city": "Oslo"}'
_BARE = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'

_VERBATIM = Dialect(name="verbatim", template=())

ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_./-]{1,128}$")]
Json = dict[str, Any]


class _Open(BaseModel):
    """Base class that checks types strictly but keeps unknown fields, because the chat template may use them."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Function(_Open):
    name: ToolName
    parameters: Json | None = None


class _Tool(_Open):
    type: Literal["function"]
    function: _Function


class _CalledFunction(_Open):
    name: Text
    arguments: Text | Json | None = None


class _ToolCall(_Open):
    type: Literal["function"] = "function"
    function: _CalledFunction


def _check_tool(tool: Json) -> Json:
    """Check a tool, and return it unchanged, because the order of its keys is visible in the prompt."""
    kind = (_Tool.model_validate(tool).function.parameters or {}).get("type", "object")
    if kind != "object":
        raise PydanticCustomError("no_object", "the type of function.parameters should be 'object'")
    return tool


def _check_call(call: Json) -> Json:
    """Check a tool call of an earlier answer, and return it unchanged."""
    _ToolCall.model_validate(call)
    if isinstance(given := call["function"].get("arguments"), str) and given:
        try:
            parse_object(given, "function.arguments", RequestError)
        except RequestError as error:
            raise PydanticCustomError("no_arguments", "{text}", {"text": str(error)}) from None  # type: ignore[misc]
    return call


class ChatMessage(_Open):
    """A message of a conversation. Unknown fields, such as `reasoning_content`, are passed to the chat template."""

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: Text | Annotated[list["TextPart"], Field(max_length=MOST_PARTS)] | None = None
    tool_calls: Annotated[list[Annotated[Json, AfterValidator(_check_call)]], Field(max_length=MOST_CALLS)] | None = (
        Field(None, description="Calls of an earlier answer, as the server returned them.")
    )

    def plain(self) -> Json:
        """Return the message as templates expect it, with its content as one text."""
        parts = self.content if isinstance(self.content, list) else None
        content = self.content if parts is None else "".join(part.text for part in parts)
        further = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_calls:
            further["tool_calls"] = self.tool_calls
        return {**further, "role": self.role, "content": content}


class TextPart(Schema):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: Text


class JsonSchema(Schema):
    """A named JSON schema."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool = Field(True, description="Not used: answers always follow the schema.")


class ResponseFormat(Schema):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_what_it_names(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type is 'json_schema', but the field json_schema is missing; add this field")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"the field json_schema is given, but type is {self.type!r}; set type to 'json_schema'")
        return self

    @property
    def schema_text(self) -> str | None:
        """Return the JSON schema of the answer as text; None for plain text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


class NamedFunction(Schema):
    """The name of a function."""

    name: ToolName


class NamedTool(Schema):
    """The function that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """A request to answer a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Annotated[Json, AfterValidator(_check_tool)]], Field(max_length=MOST_TOOLS)] | None = Field(
        None, description="Functions that the answer may call; passed to the chat template."
    )
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = Field(
        None, description="With `required` or a function, the answer consists of calls that follow the tools' schemas."
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description="False = at most one call. None = one call if tool_choice forces a call, otherwise any number.",
    )
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field({}, description="Further variables of the chat template.")

    def chat_params(self) -> SamplingParams:
        """Return the sampling parameters; see `params`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise Refused(
                "max_tokens and max_completion_tokens are the same setting; give only one of them", "max_tokens"
            )
        count = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if count == 0:
            raise Refused("max_tokens is 0; give at least 1", "max_tokens")
        schema = None if self.response_format is None else self.response_format.schema_text
        if self.forced_tools is not None:
            for field, is_given in (("response_format", schema is not None), ("ignore_eos", self.ignore_eos)):
                if is_given:
                    text = f"{field} does not work with a tool_choice that forces a call; leave one of the two out"
                    raise Refused(text, field)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.params(max_tokens=count, json_schema=schema, logprobs=logprobs)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Return the names of the functions that the answer may call; none with `tool_choice` = none."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool["function"]["name"] for tool in self.tools or ())

    @property
    def forced_tools(self) -> dict[str, Json] | None:
        """If the answer must call a function, return the parameters of each allowed function, keyed by name; else None.

        Raises:
            Refused: there are no tools, or no tool has the name in `tool_choice`.
        """
        if self.tool_choice in (None, "auto", "none"):
            return None
        tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools or ()}
        if not isinstance(self.tool_choice, NamedTool):
            if not tools:
                text = "tool_choice is 'required', but the request has no tools; give tools, or leave tool_choice out"
                raise Refused(text, "tool_choice")
            return tools
        name = self.tool_choice.function.name
        if name not in tools:
            text = f"tool_choice names the function {name!r}, which is not among the tools; choose one of the tools"
            raise Refused(text, "tool_choice")
        return {name: tools[name]}

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template, without the messages."""
        return {**self.chat_template_kwargs, **({"tools": self.tools} if self.tools else {})}


class TokenizeRequest(Schema):
    """A request for the tokens of a text, or of a conversation in the model's template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages, and not both")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """How to separate a model's answer into thinking, tool calls and text.

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
        """Return those of a tokenizer's added tokens that mark thinking or calls in this format.

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
