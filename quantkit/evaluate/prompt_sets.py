"""Chat prompts of a behaviour test, from the bundled set or a user's file, and checks of the form of an answer.

Each line of a file is a JSON object with `messages` and, if they apply, `tools` (OpenAI's form), `kind` (a name for
groups of prompts) and `expect`, the form that the prompt asks for. In the bundled set the kinds take turns, so that its
first prompts are a fair sample of all of them.
"""

import csv
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import DataError
from quantkit.runtime.dialects.dialect import Call
from quantkit.safety.untrusted import parse_object, read_text, shorten

BUNDLED = Path(__file__).parent / "prompts" / "bundled.jsonl"
_MAX_BYTES, _MAX_LINE = 1 << 26, 1 << 20
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}

Schema = dict[str, Any]


def _check_schema(schema: Any) -> Any:
    """Return a value unchanged if it is a JSON schema, otherwise raise ValueError.

    Only the keywords that `fits_schema` uses are checked.
    """
    if not isinstance(schema, dict):
        raise ValueError(f"{shorten(schema)} is not a JSON schema; a schema is an object")
    for kind in _as_list(schema.get("type", [])):
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ValueError(f"{shorten(kind)} is not a type of JSON schema; the types are: {', '.join(_TYPES)}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise ValueError(f"'properties' of a JSON schema must be an object, not {shorten(properties)}")
    if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
        raise ValueError(f"'required' of a JSON schema must be a list of property names, not {shorten(required)}")
    if not isinstance(schema.get("enum", []), list):
        raise ValueError(f"'enum' of a JSON schema must be a list, not {shorten(schema['enum'])}")
    for inner in (*properties.values(), *([schema["items"]] if "items" in schema else [])):
        _check_schema(inner)
    return schema


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Function(_Strict):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: Annotated[str, Field(min_length=1)]
    parameters: Annotated[Schema, AfterValidator(_check_schema)] = {}


class Tool(_Strict):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: Function


class Message(_Strict):
    """A message with one of OpenAI's roles; further keys, such as `tool_calls`, go to the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None


class Expect(_Strict):
    """The form that a right answer has. Fields that are None are not checked.

    Args:
        calls: names of tools that must be called; empty = no tool may be called.
        json_: keys that the answer must have; the answer must be one JSON object and nothing else.
        csv_: number of columns that every line must have; the answer must be CSV with at least two lines.
        items: number of lines that must begin with a dash, a star or a number.
        line: text with which at least one line must begin.
        options: allowed answers; the whole answer must be one of them.
        refusal: whether the model should refuse the request.
    """

    calls: list[str] | None = None
    json_: Annotated[list[str] | None, Field(alias="json")] = None
    csv_: Annotated[int | None, Field(alias="csv", ge=1)] = None
    items: Annotated[int | None, Field(ge=1)] = None
    line: str | None = None
    options: list[str] | None = None
    refusal: bool = False

    def is_met(self, answer: str) -> bool | None:
        """Whether an answer has the expected form, not counting `calls` and `refusal`; None if no form is expected."""
        text = answer.strip()
        if self.json_ is not None:
            try:
                return parse_object(without_fence(text), "answer", DataError).keys() >= set(self.json_)
            except DataError:
                return False
        lines = without_fence(text).splitlines()
        if self.csv_ is not None:
            try:
                rows = list(csv.reader(line for line in lines if line.strip()))
            except csv.Error:
                return False
            return len(rows) > 1 and all(len(row) == self.csv_ for row in rows)
        if self.items is not None:
            listed = [line for line in lines if line.lstrip().startswith(("-", "*", *"123456789"))]
            return len(listed) == self.items
        if self.line is not None:
            return any(line.lstrip(" *#").startswith(self.line) for line in lines)
        return None if self.options is None else text.rstrip(".):") in self.options


class Prompt(_Strict):
    """One prompt of a behaviour test.

    Args:
        messages: a conversation that ends before the answer.
        tools: functions that the model may call.
        kind: name of the group that the prompt belongs to.
        expect: form that a right answer has; see `Expect`.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] = []
    kind: str = ""
    expect: Expect = Expect()

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as a chat template reads them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def question(self) -> str:
        """The text of the last message."""
        return self.messages[-1].content or ""

    def is_valid(self, calls: list[Call | None]) -> bool:
        """Whether each call names an existing tool and fits the tool's schema, and all expected tools are called.

        Args:
            calls: calls in an answer; None = a call that cannot be parsed.
        """
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        good = [call for call in calls if call and call[0] in schemas and fits_schema(call[1], schemas[call[0]])]
        expected = self.expect.calls
        as_asked = expected is None or (bool(expected) == bool(good) and {name for name, _ in good} >= set(expected))
        return len(good) == len(calls) and as_asked


def without_fence(text: str) -> str:
    """Return the content of a fenced code block, or the text itself if it is not one."""
    first, _, rest = text.partition("\n")
    return rest.removesuffix("```").strip() if first.startswith("```") and rest.endswith("```") else text


def fits_schema(value: Any, schema: Schema) -> bool:
    """Whether a value fits a JSON schema: type, enum, properties, required, items and additionalProperties: false.

    Other keywords are ignored, so a value that violates only ignored keywords counts as valid.
    """
    kinds = _as_list(schema.get("type", []))
    # In Python a boolean is an integer, in JSON it is not.
    if kinds and not any(
        isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds
    ):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits_schema(item, schema.get("items", {})) for item in value)
    if not isinstance(value, dict):
        return True
    known = schema.get("properties", {})
    if schema.get("additionalProperties") is False and not value.keys() <= known.keys():
        return False
    inside = all(fits_schema(item, known[name]) for name, item in value.items() if name in known)
    return inside and value.keys() >= set(schema.get("required", []))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_prompts(path: Path | None = None) -> tuple[Prompt, ...]:
    """Read a file of prompts.

    Args:
        path: a .jsonl file; None = the bundled set.
    Raises:
        DataError: the file cannot be read or is empty, or a line is not a prompt; the message names the line.
    """
    path = path or BUNDLED
    prompts = []
    # Not splitlines, which also splits at U+2028, a character that JSON texts may contain unescaped.
    for number, line in enumerate(read_text(path, DataError, _MAX_BYTES).split("\n"), start=1):
        where = f"{path}:{number}"
        if len(line) > _MAX_LINE:
            raise DataError(f"{where}: the line has {len(line)} characters, over the limit of {_MAX_LINE}; shorten it")
        if line.strip():
            record = parse_object(line, where, DataError, "one JSON object per line is needed")
            prompts.append(_parse(record, where))
    if not prompts:
        raise DataError(f'{path} is empty; write one prompt per line, as JSON: {{"messages": [...]}}')
    return tuple(prompts)


def _parse(record: dict[str, Any], where: str) -> Prompt:
    try:
        return Prompt.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = "" if first["type"] in ("missing", "value_error") else f" (value: {shorten(first['input'])})"
        raise DataError(f"{where}: {key}: {first['msg']}{value}; see docs/behaviour.md for the form") from None


def digest_text(prompt: Prompt) -> str:
    """Return a prompt's messages and tools as JSON text, which identifies the prompt."""
    return json.dumps([prompt.chat, prompt.functions], sort_keys=True)
