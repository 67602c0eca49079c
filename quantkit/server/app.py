"""The HTTP routes: check requests, submit them to the engine, and report refusals."""

import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quantkit.errors import QuantkitError, RequestError
from quantkit.runtime.config import adapter_folders
from quantkit.runtime.detokenizer import special_tokens
from quantkit.runtime.dialects.dialect import find_dialect
from quantkit.runtime.types import SamplingParams
from quantkit.server import answers
from quantkit.server.admission import Asked, Bodies, Doorkeeper, Run
from quantkit.server.answers import ChatShape, Shape, TextShape, Vocabulary
from quantkit.server.bridge import Bridge, Mailbox
from quantkit.server.conversations import AnswerFormat, ChatMessage, ChatRequest, TokenizeRequest
from quantkit.server.metrics import Metrics
from quantkit.server.schemas import (
    CompletionRequest,
    DetokenizeRequest,
    Refused,
    Sampling,
    Schema,
    StreamOptions,
    openapi_document,
)
from quantkit.server.streams import EventStream, whole_answer

# Tokenizing this many characters takes about a millisecond; longer texts are tokenized in another thread.
_SHORT_TEXT = 4096
# `/tokenize` and `/detokenize` accept at least this many tokens, even if the model's context is shorter.
_SHOWN_TOKENS = 1 << 16


_ROUTES: dict[str, tuple[str, type[Schema] | None]] = {
    "/health": ("health", None),
    "/ready": ("ready", None),
    "/metrics": ("show_metrics", None),
    "/openapi.json": ("openapi", None),
    "/v1/models": ("models", None),
    "/v1/models/{name:path}": ("model", None),
    "/v1/completions": ("complete", CompletionRequest),
    "/v1/chat/completions": ("chat", ChatRequest),
    "/tokenize": ("tokenize", TokenizeRequest),
    "/detokenize": ("detokenize", DetokenizeRequest),
}
"""For each path: the method of `Server` that answers, and the type of the POST body; None = a GET request."""


@dataclass(eq=False)
class Server:
    """State shared by the routes. *Mutable*.

    Args:
        bridge: connection to the engine.
        name: name that clients use for the model.
        max_prompt: maximum number of prompt tokens; None = as many as the engine can hold.
        key: API key that clients must send; None = no key is needed.
        log: called with one line per request; None = requests are not logged.
        origins: web origins that are allowed in addition to the server's own origin; "*" = all.
        hosts: names of this server accepted in the `Host` header; None = any.
        is_ending: whether the server is shutting down and refuses requests.
        created: time that clients see as the model's creation time, in seconds since 1970.
    """

    bridge: Bridge
    name: str
    max_prompt: int | None = None
    key: str | None = None
    log: Callable[[str], None] | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    is_ending: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    bodies: Bodies = field(default_factory=Bodies)

    @cached_property
    def metrics(self) -> Metrics:
        """Metrics since the server started."""
        return Metrics(self.bridge)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Converts the model's tokens to text.

        Raises:
            RequestError: the model has no tokenizer.
        """
        return Vocabulary(self.bridge.llm.need_tokenizer())

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route(path, getattr(self, name), methods=["GET" if kind is None else "POST"])
            for path, (name, kind) in _ROUTES.items()
        ]
        handlers = dict.fromkeys((QuantkitError, HTTPException, ClientDisconnect, Exception), self._refuse)
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
        door = Doorkeeper(app=app, key=self.key, log=self.log, origins=self.origins, hosts=self.hosts)
        if not self.origins:
            return door
        # CORS precedes the key check, because preflight requests have no key, and a page should see why it was refused.
        return CORSMiddleware(
            door,
            allow_origins=self.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )

    async def health(self, _request: Request) -> Response:
        """Report whether the engine works."""
        lost = self.bridge.is_lost
        return JSONResponse({"status": "steps fail; restart" if lost else "ok"}, status_code=503 if lost else 200)

    async def ready(self, _request: Request) -> Response:
        """Report whether the server accepts requests."""
        self._check_ready()
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, _request: Request) -> Response:
        """Return the metrics as text, see `Metrics`."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, _request: Request) -> Response:
        """Return the OpenAPI description."""
        texts = {name: str(getattr(self, name).__doc__).partition(".")[0] for name, _ in _ROUTES.values()}
        return JSONResponse(openapi_document({path: (texts[name], kind) for path, (name, kind) in _ROUTES.items()}))

    async def models(self, _request: Request) -> Response:
        """Return a list with the served model and its adapters."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """Return the model with this name; the list if no name is given."""
        if not request.path_params["name"]:
            return await self.models(request)
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model(request.path_params["name"]))

    @property
    def _names(self) -> list[str]:
        """Names that clients can choose: the model's, and those of its adapters."""
        return [self.name, *adapter_folders(self.bridge.llm.config.adapters)]

    def _model(self, name: str) -> answers.Json:
        length = self.bridge.engine.capacity if self.bridge.is_ready else None
        about = {"created": self.created, "owned_by": "quantkit", "max_model_len": length}
        # The same fields as in vLLM; `parent` is the model that an adapter changes.
        return {
            "id": name,
            "object": "model",
            "root": name,
            "parent": None if name == self.name else self.name,
            **about,
        }

    async def complete(self, request: Request) -> Response | EventStream:
        """Continue texts."""
        async with self._opened(request, CompletionRequest) as (ask, run):
            if ask.stream and ask.echo and ask.logprobs is not None:
                raise Refused("echo with logprobs cannot be streamed; set stream to false", "echo")
            vocabulary = self.vocabulary  # first, to fail before anything is computed if there is no tokenizer
            self.bridge.check_capacity(len(ask.prompts), ask.n)
            prompts = await self._encoded(ask.prompts, run)
            texts = await run(partial(self._shown, ask.prompts)) if ask.echo else [""] * len(prompts)
            mailbox = self.bridge.submit([(ids, self._samples(ask, ask.params_for(len(ids)))) for ids in prompts])
        asked = [pair for pair in zip(texts, prompts, strict=True) for _ in range(ask.n)]
        shape = TextShape(ask, asked, vocabulary, ask.model or self.name)
        num_prompt = sum(len(ids) for ids in prompts)
        return await self._answer(request, ask, mailbox, shape, num_prompt, hidden=ask.max_tokens == 0)

    async def chat(self, request: Request) -> Response | EventStream:
        """Answer a conversation."""
        async with self._opened(request, ChatRequest) as (ask, run):
            params = ask.chat_params()
            self._check_variables(ask.chat_template_kwargs)
            self.bridge.check_capacity(1, ask.n)
            text, ids = await run(partial(self._encoded_chat, ask.messages, ask.variables, self._most_tokens))
            tokenizer = self.bridge.llm.need_tokenizer()
            form = AnswerFormat.of(ask, find_dialect(str(tokenizer.chat_template)), text)
            shown = frozenset(form.marker_tokens(self._special_tokens).values())
            params = await self._constrained(replace(params, shown_tokens=shown), form)
            mailbox = self.bridge.submit([(self._bounded(ids), self._samples(ask, params))])
        shape = ChatShape(ask, [form.parser() for _ in range(ask.n)], self.vocabulary, ask.model or self.name)
        return await self._answer(request, ask, mailbox, shape, len(ids))

    def _samples(self, ask: Sampling, params: SamplingParams) -> list[SamplingParams]:
        """Return the parameters of each answer to a prompt, computed with the adapter that the request names."""
        adapter = None if ask.model in (None, self.name) else ask.model
        return ask.samples(replace(params, adapter=adapter))

    @cached_property
    def _special_tokens(self) -> Mapping[str, int]:
        return special_tokens(self.bridge.llm.need_tokenizer())

    async def _constrained(self, params: SamplingParams, form: AnswerFormat) -> SamplingParams:
        """Try out the request's schemas. Return the parameters, with a grammar added if the answer must call a tool.

        Raises:
            Refused: the schema of a tool's parameters cannot be enforced.
            RequestError: the schema of the response format cannot be enforced.
        """
        try_out = self.bridge.engine.schemas.try_out
        if params.json_schema is not None:
            await self.bodies.try_out(partial(try_out, "json_schema", params.json_schema))
        tokenizer = self.bridge.llm.need_tokenizer()
        added = {str(each): token for token, each in tokenizer.added_tokens_decoder.items()}
        if (grammar := form.grammar(form.marker_tokens(added))) is None:
            return params
        try:
            await self.bodies.try_out(partial(try_out, "grammar", grammar, form.grammar({})))
        except Refused:
            raise
        except RequestError as error:
            raise Refused(f"the schemas of the tools cannot be enforced: {error}", "tools") from None
        return replace(params, grammar=grammar)

    def _encoded_chat(
        self, messages: list[ChatMessage], variables: Mapping[str, Any], most: int
    ) -> tuple[str, list[int]]:
        """Return a conversation in the chat template, and its tokens."""
        llm = self.bridge.llm
        text = llm.chat_text([message.plain() for message in messages], **variables)
        llm.check_length(text, most)
        return text, llm.encode_filled(text)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuse template variables whose names the server reserves for itself.

        Raises:
            Refused: a name is reserved.
        """
        own = {*inspect.signature(self.bridge.llm.need_tokenizer().apply_chat_template).parameters, "messages"}
        if wrong := sorted(own & variables.keys()):
            field = "chat_template_kwargs"
            raise Refused(f"{field}.{wrong[0]} is reserved for the server; leave it out", field)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or a conversation."""
        async with self._opened(request, TokenizeRequest) as (ask, run):
            most = max(_SHOWN_TOKENS, self.bridge.engine.capacity)
            if ask.messages is not None:
                _, ids = await run(partial(self._encoded_chat, ask.messages, {}, most))
            else:
                ids = await run(partial(self._encoded_text, ask.prompt or "", most))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.bridge.engine.capacity})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        async with self._opened(request, DetokenizeRequest) as (ask, run):
            size, most = self.bridge.engine.model.vocab_size, max(_SHOWN_TOKENS, self.bridge.engine.capacity)
            if len(ask.tokens) > most:
                text = f"tokens holds {len(ask.tokens)} tokens; this server accepts at most {most}, so send fewer"
                raise Refused(text, "tokens")
            if wrong := [token for token in ask.tokens if not 0 <= token < size]:
                raise Refused(f"tokens holds {wrong[0]}; the model's token ids are 0 to {size - 1}", "tokens")
            return JSONResponse({"prompt": await run(partial(self.vocabulary.text, ask.tokens))})

    async def _answer(
        self, request: Request, ask: Sampling, mailbox: Mailbox, shape: Shape, num_prompt: int, *, hidden: bool = False
    ) -> Response | EventStream:
        if ask.stream:
            options = ask.stream_options or StreamOptions()
            return EventStream(self.bridge, mailbox, shape, self.metrics.ended, options, num_prompt, hidden=hidden)
        return await whole_answer(request.receive, self.bridge, mailbox, shape, self.metrics.ended, hidden=hidden)

    @asynccontextmanager
    async def _opened(self, request: Request, kind: type[Asked]) -> AsyncIterator[tuple[Asked, Run]]:
        """Yield the checked request, see `Bodies.opened`.

        Raises:
            RequestError: the request is invalid or names a model that is not served, or the model is not loaded yet.
        """
        self._check_ready()
        most_ids = self.bridge.most_open * self.bridge.engine.capacity
        async with self.bodies.opened(request, kind, most_ids) as (ask, run):
            self._check_name(getattr(ask, "model", None))
            yield ask, run

    def _check_name(self, model: str | None) -> None:
        if model is not None and model not in self._names:
            names = " or ".join(map(repr, self._names))
            raise Refused(f"model {model[:100]!r} is not served here; use {names}", "model", status=404)

    def _check_ready(self) -> None:
        if self.is_ending or not self.bridge.is_ready:
            why = "is shutting down; use another server" if self.is_ending else "is loading the model; try again later"
            raise Refused(f"the server {why}", status=503, retry_after=1)

    async def _encoded(self, prompts: list[str | list[int]], run: Run) -> list[list[int]]:
        """Return the tokens of prompts; encode long texts in another thread, and refuse prompts that are too long."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        # Each text has a fixed cost in addition to that of its characters.
        is_short = sum(map(len, texts)) + 64 * len(texts) <= _SHORT_TEXT
        encoded = self.bridge.llm.encode_if_free(texts) if is_short else None
        if encoded is None:
            most = self._most_tokens
            encoded = await run(lambda: [self._encoded_text(text, most) for text in texts])
        of_texts = iter(encoded)
        return [self._bounded(next(of_texts) if isinstance(prompt, str) else prompt) for prompt in prompts]

    def _encoded_text(self, text: str, most: int) -> list[int]:
        self.bridge.llm.check_length(text, most)
        return self.bridge.llm.encode(text)

    @property
    def _most_tokens(self) -> int:
        """The maximum number of tokens of a prompt."""
        capacity = self.bridge.engine.capacity
        return capacity if self.max_prompt is None else min(capacity, self.max_prompt)

    def _shown(self, prompts: list[str | list[int]]) -> list[str]:
        try:
            return [prompt if isinstance(prompt, str) else self.vocabulary.text(prompt) for prompt in prompts]
        except OverflowError:
            text = "prompt has a token id that is not in the model's vocabulary; use the ids of the model's tokenizer"
            raise Refused(text, "prompt") from None

    def _bounded(self, ids: list[int]) -> list[int]:
        if self.max_prompt is not None and len(ids) > self.max_prompt:
            text = f"the prompt has {len(ids)} tokens; this server accepts at most {self.max_prompt}, so shorten it"
            raise Refused(text, "prompt")
        return ids

    async def _refuse(self, request: Request, problem: Exception) -> Response:
        """Return a refusal or a failure in OpenAI's format."""
        # Messages may name the model's folder, which clients must not see; they get the model's name instead.
        status, body, headers = _explained(problem, hidden=str(self.bridge.llm.path), shown=self.name)
        self.metrics.rejected.labels(str(status)).inc()
        if status == 500 and self.log is not None:
            self.log(f"{request.method} {request.url.path}: {type(problem).__name__}: {problem}")
        return JSONResponse(body, status_code=status, headers=headers)


def _explained(problem: Exception, *, hidden: str, shown: str) -> tuple[int, answers.Json, dict[str, str]]:
    """Return status, body and headers for an exception that ended a request."""
    text = str(problem).replace(hidden, shown)
    if isinstance(problem, HTTPException):
        return problem.status_code, answers.error(problem.detail), dict(problem.headers or {})
    if isinstance(problem, Refused):
        kind = {429: "rate_limit_error", 503: "server_error"}.get(problem.status, "invalid_request_error")
        code = "model_not_found" if problem.status == 404 else None
        return problem.status, answers.error(text, kind=kind, field=problem.field, code=code), problem.headers
    if isinstance(problem, RequestError):
        return 400, answers.error(text), {}
    if isinstance(problem, ClientDisconnect):
        return 499, {}, {}
    return 500, answers.error("the server failed on this request; see the server's log", kind="server_error"), {}
