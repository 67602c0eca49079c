"""Request bodies: OpenAI's fields, and the sampling fields that vLLM and llama.cpp added.

The server refuses unknown fields, and values that it would have to ignore; the message names the field. Defaults are
OpenAI's, so the server samples by default, whereas quantkit's command line decodes greedily.
Source: https://platform.openai.com/docs/api-reference
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticCustomError

import quantkit
from quantkit.errors import RequestError
from quantkit.runtime.sampling import derived_seed
from quantkit.runtime.types import PromptScoring, SamplingParams
from quantkit.safety.untrusted import shorten

MOST_PROMPTS, MOST_STOPS, MOST_LOGPROBS = 1024, 64, 20
MOST_SAMPLES, MOST_BIASES = 16, 1024
DEFAULT_COMPLETION_TOKENS = 16


def _check_ids(value: Any) -> Any:
    """Refuse a list with non-integer items with a single error; pydantic would report each of a million items."""
    if isinstance(value, list) and (wrong := set(map(type, value)) - {int}):
        index = next(index for index, item in enumerate(value) if type(item) in wrong)
        text = "token {index} should be a valid integer, not {given}"
        raise PydanticCustomError("no_integer", text, {"index": index, "given": shorten(value[index])})  # type: ignore[misc]
    return value


def _check_biases(value: Any) -> Any:
    """Refuse too many biases, or keys that are not token ids, with a single error."""
    if isinstance(value, dict):
        if len(value) > MOST_BIASES:
            text = "it should have at most {most} entries, not {count}"
            raise PydanticCustomError("many_biases", text, {"most": MOST_BIASES, "count": len(value)})  # type: ignore[misc]
        if wrong := [key for key in value if not re.fullmatch("0|[1-9][0-9]{0,9}", key)]:
            raise PydanticCustomError("no_token", "{given} is not a token id", {"given": shorten(wrong[0])})  # type: ignore[misc]
    return value


def _kind_of_prompt(value: Any) -> str | None:
    """Return the type of a prompt, judged by its first item, so that errors refer to that type only."""
    if isinstance(value, list):
        return _KINDS.get(type(value[0]), None) if value else "several texts"
    return "a text" if isinstance(value, str) else None


_KINDS: dict[type, str] = {str: "several texts", list: "lists of token ids"}
_KINDS |= dict.fromkeys((int, float, bool), "token ids")

Ids = Annotated[list[int], BeforeValidator(_check_ids)]
Text = Annotated[str, Field(max_length=1 << 22)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_check_biases)]
Stop = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=MOST_STOPS)]


class Refused(RequestError):
    """A request that the server refuses.

    Args:
        text: one-line message.
        field: name of the offending request field; None = the whole request.
        status: HTTP status of the response.
        headers: HTTP headers of the response.
    """

    def __init__(self, text: str, field: str | None = None, *, status: int = 400, **headers: object) -> None:
        super().__init__(text)
        self.field, self.status = field, status
        self.headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}


class Schema(BaseModel):
    """Base class of request bodies: refuses unknown fields and wrong types. Fields that are null count as not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    takes_ids: ClassVar[bool] = False
    """Whether the body may hold token ids, so that more values are allowed than in other bodies."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False, description="With include_usage: every part contains the number of tokens so far."
    )


class Sampling(Schema):
    """Fields that text and chat requests share."""

    model: str | None = Field(None, description="Name of the served model or of an adapter; None = the model.")
    max_tokens: int | None = None
    temperature: Annotated[float, Field(le=100)] = 1.0
    top_p: float = 1.0
    top_k: int = Field(-1, description="Number of likeliest tokens to choose from; -1 or 0 = all.")
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: int | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Stop = []
    stop_token_ids: Annotated[Ids, Field(max_length=MOST_STOPS)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = Field(1, description="Number of answers to each prompt.")
    logit_bias: Biases | None = Field(None, description="Values to add to logits, keyed by token id.")
    user: str | None = Field(None, description="Not used.")

    def params(self, **given: Any) -> SamplingParams:
        """Return the sampling parameters for the engine.

        Args:
            given: further fields of `SamplingParams`.
        Raises:
            Refused: a value is out of range.
        """
        if self.stream_options is not None and not self.stream:
            raise Refused(
                "stream_options is given without stream; leave it out, or set stream to true", "stream_options"
            )
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
        own = {name: getattr(self, name) for name in (*names, "stop", "stop_token_ids", "ignore_eos")}
        if self.logit_bias:
            own["logit_bias"] = {int(token): value for token, value in self.logit_bias.items()}
        try:
            return SamplingParams(**own, top_k=None if self.top_k in (-1, 0) else self.top_k, **given)
        except RequestError as error:
            raise Refused(str(error), str(error).split()[0]) from None

    def samples(self, params: SamplingParams) -> list[SamplingParams]:
        """Return the parameters of each of the `n` answers to a prompt.

        With a seed, the first answer uses this seed and equals the answer with `n` = 1. The other answers use seeds
        derived from it.
        """
        if self.seed is None:
            return [params] * self.n
        seeds = [derived_seed(self.seed, number) & ((1 << 63) - 1) for number in range(1, self.n)]
        return [params, *(replace(params, seed=seed) for seed in seeds)]


class CompletionRequest(Sampling):
    """A request to continue one or several texts."""

    takes_ids: ClassVar[bool] = True

    prompt: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[Ids, Tag("token ids")]
        | Annotated[list[Text], Field(max_length=MOST_PROMPTS), Tag("several texts")]
        | Annotated[list[Ids], Field(max_length=MOST_PROMPTS), Tag("lists of token ids")],
        Discriminator(
            _kind_of_prompt,
            custom_error_type="no_prompt",
            custom_error_message="it should be a text, token ids, or a list of either",
        ),
    ]
    echo: bool = Field(False, description="Whether the answer repeats the prompt, with log-probabilities if requested.")
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Literal[1] = 1

    @property
    def prompts(self) -> list[str | Ids]:
        """Return the prompts as a list."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        if several and not prompt:
            raise Refused("prompt is an empty list; give a text, token ids, or a list of either", "prompt")
        return list(prompt) if several else [prompt]

    def params_for(self, num_prompt: int) -> SamplingParams:
        """Return the sampling parameters for a prompt of this many tokens; see `params`."""
        count = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        scores = self.echo and self.logprobs is not None and num_prompt > 1
        if count == 0 and not self.echo:
            raise Refused("max_tokens is 0; give at least 1, or set echo", "max_tokens")
        if count == 0 and not scores:
            # The client wants no tokens, but the engine computes at least one, which is not shown.
            return SamplingParams(max_tokens=1)
        scoring = PromptScoring(num_tokens=num_prompt - 1, top=self.logprobs or 0) if scores else None
        return self.params(max_tokens=count, logprobs=self.logprobs, scoring=scoring)


class DetokenizeRequest(Schema):
    """A request to convert token ids to text."""

    takes_ids: ClassVar[bool] = True

    model: str | None = None
    tokens: Annotated[Ids, Field(max_length=1 << 20)]


def explain_validation(error: ValidationError) -> Refused:
    """Return a refusal with the most helpful of a request's validation errors, in one line."""
    # If a field may have several types, the error of the type that fits best is the most helpful one.
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda item: (not item["type"].endswith("_type"), len(item["loc"])))
    path = [str(part) for part in first["loc"] if not (isinstance(part, str) and not part.isidentifier())]
    field = path[0] if path else None
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        return Refused(f"{name} is not supported by this server; leave it out", field)
    if first["type"] == "missing":
        return Refused(f"{name} is missing; give this field", field)
    should = "this server supports only" if "literal" in first["type"] else "it should be"
    problem = first["msg"].removeprefix("Value error, ").replace("Input should be", should)
    return Refused(f"{name} is {shorten(first['input'])}: {problem}" if name else problem, field)


Json = dict[str, Any]

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}


def openapi_document(routes: Mapping[str, tuple[str, type[Schema] | None]]) -> Json:
    """Return the OpenAPI description of the server.

    Args:
        routes: (summary, type of the body) of each route, keyed by path; the type is None for a GET request.
    """
    kinds = [(kind, "validation") for _, kind in routes.values() if kind is not None]
    _, models = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    failure = {"description": "a refusal or a failure", "content": {"application/json": {"schema": _ERROR}}}
    paths: Json = {}
    for path, (text, kind) in routes.items():
        forms: Json = {"text/plain" if path == "/metrics" else "application/json": {}}
        if kind is not None and issubclass(kind, Sampling):
            forms["text/event-stream"] = {}
        responses = {"200": {"description": "the answer", "content": forms}, "default": failure}
        operation: Json = {"summary": text, "responses": responses}
        if "{name" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if kind is not None:
            body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": body}
        paths[path.replace(":path", "")] = {"get" if kind is None else "post": operation}
    info = {"title": "quantkit", "version": quantkit.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": models["$defs"]}}
