"""The OpenAPI description: requests from their schemas, answers as plain objects."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

import quantkit
from quantkit.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, Schema, TokenizeRequest

Json = dict[str, Any]

_POSTS: dict[str, tuple[type[Schema], str]] = {
    "/v1/completions": (CompletionRequest, "Continue texts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/tokenize": (TokenizeRequest, "Tokens of a text"),
    "/detokenize": (DetokenizeRequest, "Text of tokens"),
}
_GETS = {
    "/v1/models": "The served model",
    "/v1/models/{model}": "The served model, by its name",
    "/health": "Whether it computes",
    "/ready": "Whether it takes requests",
    "/openapi.json": "This description",
}
_REFUSALS = {"400": "refused", "401": "no key", "403": "a page of others", "404": "no such model"}
_REFUSALS |= {"413": "too large", "429": "too many wait"}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}


@cache
def describe() -> Json:
    """The document; served as JSON."""
    kinds = [(schema, "validation") for schema, _ in _POSTS.values()]
    _, models = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: Json = {path: {"get": {"summary": text, "responses": _responses({})}} for path, text in _GETS.items()}
    paths["/metrics"] = {"get": {"summary": "Prometheus metrics", "responses": {"200": {"description": "text"}}}}
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [model]
    for path, (schema, text) in _POSTS.items():
        body = {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}
        streams = {"text/event-stream": {"schema": {"type": "object"}}} if path.startswith("/v1/") else {}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": _responses(streams),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "quantkit", "version": quantkit.__version__},
        "paths": paths,
        "components": {"schemas": models["$defs"]},
    }


def _responses(streams: Json) -> Json:
    answer = {"application/json": {"schema": {"type": "object"}}, **streams}
    failure = {"application/json": {"schema": _ERROR}}
    refusals = {**_REFUSALS, "500": "a failure", "503": "not ready"}
    return {
        "200": {"description": "the answer", "content": answer},
        **{status: {"description": text, "content": failure} for status, text in refusals.items()},
    }
