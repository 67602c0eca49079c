"""The routes: what is asked, checked and handed to the engine, and how a refusal is said."""

import asyncio
import hmac
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.errors import QuantkitError, RequestError
from quantkit.server import answers
from quantkit.server.bridge import Bridge, Busy, Mailbox
from quantkit.server.metrics import Metrics
from quantkit.server.openapi import describe
from quantkit.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refused,
    Sampling,
    Schema,
    StreamOptions,
    TokenizeRequest,
    explain,
)
from quantkit.server.shapes import ChatShape, Shape, TextShape
from quantkit.server.streams import EventStream, whole_answer
from quantkit.server.vocabulary import Vocabulary
from quantkit.untrusted import parse_object

MAX_BODY_BYTES = 1 << 24
BODY_SECONDS = 30.0
_NOT_READY_SECONDS = 1
# Tokenizing so many characters takes about a millisecond; more is done beside the event loop.
_SHORT_TEXT = 4096
_OPEN_PATHS = ("/health", "/ready")

Asked = TypeVar("Asked", bound=Schema)


class _TooLarge(QuantkitError):
    """A body beyond the limit."""


class _UnknownModel(RequestError):
    """Another model than the served one."""


class _NotReady(QuantkitError):
    """The model is being loaded, or the server ends."""


@dataclass(eq=False, slots=True)
class Server:
    """What the routes share. *Mutable*.

    Args:
        bridge: to the engine.
        name: that clients call the model.
        max_prompt: tokens of a prompt at most; None = as many as fit.
        key: that clients must bring; None = anybody may.
        log: told of each request in a line; None = not logged.
        origins: whose pages may ask, beside its own; "*" = all.
        is_ending: whether requests are refused since the server ends.
        created: when it was, for clients that show it.
    """

    bridge: Bridge
    name: str
    max_prompt: int | None = None
    key: str | None = None
    log: Callable[[str], None] | None = None
    origins: tuple[str, ...] = ()
    is_ending: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _vocabulary: Vocabulary | None = None
    _metrics: Metrics | None = None

    @property
    def metrics(self) -> Metrics:
        """Counters since the start."""
        if self._metrics is None:
            self._metrics = Metrics(self.bridge)
        return self._metrics

    @property
    def vocabulary(self) -> Vocabulary:
        """Tokens as texts.

        Raises:
            RequestError: the model has no tokenizer.
        """
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self.bridge.llm.need_tokenizer())
        return self._vocabulary

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/health": ("GET", self.health),
            "/ready": ("GET", self.ready),
            "/metrics": ("GET", self.show_metrics),
            "/openapi.json": ("GET", self.openapi),
            "/v1/models": ("GET", self.models),
            "/v1/models/{name:path}": ("GET", self.model),
            "/v1/completions": ("POST", self.complete),
            "/v1/chat/completions": ("POST", self.chat),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
        }
        handlers = dict.fromkeys((QuantkitError, HTTPException, ClientDisconnect, Exception), self._refuse)
        app = Starlette(
            routes=[Route(path, route, methods=[method]) for path, (method, route) in routes.items()],
            exception_handlers=handlers,  # type: ignore[arg-type]
        )
        door = _Doorkeeper(app, self)
        if not self.origins:
            return door
        # Before the key: browsers ask without one whether they may, and a page should see why it was refused.
        return CORSMiddleware(
            door,
            allow_origins=self.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )

    async def health(self, _request: Request) -> Response:
        """Whether it computes at all."""
        lost = self.bridge.is_lost
        return JSONResponse({"status": "steps fail; restart" if lost else "ok"}, status_code=503 if lost else 200)

    async def ready(self, _request: Request) -> Response:
        """Whether it takes requests."""
        self._check_ready()
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, _request: Request) -> Response:
        """See `Metrics`."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, _request: Request) -> Response:
        """What this server offers."""
        return JSONResponse(describe())

    async def models(self, _request: Request) -> Response:
        """The one model, in a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of that name; of none, the list."""
        if not request.path_params["name"]:
            return await self.models(request)
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> answers.Json:
        length = self.bridge.engine.capacity if self.bridge.is_ready else None
        about = {"created": self.created, "owned_by": "quantkit", "max_model_len": length}
        return {"id": self.name, "object": "model", **about}

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        ask = await self._read(request, CompletionRequest)
        prompts = [await self._encoded(prompt) for prompt in ask.prompts]
        if ask.stream and ask.echo and ask.logprobs is not None:
            raise Refused("echo with logprobs is not streamed; set stream to false", "echo")
        vocabulary = self.vocabulary  # first: without a tokenizer nothing is to be computed
        mailbox = self.bridge.submit([(ids, ask.params_for(len(ids))) for ids in prompts])
        shown = zip(ask.prompts, prompts, strict=True)
        texts = [
            ("" if not ask.echo else given if isinstance(given, str) else self._plain(given), ids)
            for given, ids in shown
        ]
        shape = TextShape(ask, texts, vocabulary, self.name)
        num_prompt = sum(len(ids) for ids in prompts)
        return await self._answer(request, ask, mailbox, shape, num_prompt, hidden=ask.max_tokens == 0)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        ask = await self._read(request, ChatRequest)
        params = ask.chat_params()
        self._check_variables(ask.chat_template_kwargs)
        messages = [message.plain() for message in ask.messages]
        ids = await asyncio.to_thread(self.bridge.llm.encode_chat, messages, **ask.variables)
        mailbox = self.bridge.submit([(self._bounded(ids), params)])
        return await self._answer(request, ask, mailbox, ChatShape(ask, self.vocabulary, self.name), len(ids))

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Clients may give a template its variables; the template itself and how it is called are the server's.

        Raises:
            Refused: one is not the template's.
        """
        own = {*inspect.signature(self.bridge.llm.need_tokenizer().apply_chat_template).parameters, "messages"}
        if wrong := sorted(own & variables.keys()):
            field = "chat_template_kwargs"
            raise Refused(f"{field}.{wrong[0]} is no variable of a template; leave it out", field)

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text or a conversation."""
        ask = await self._read(request, TokenizeRequest)
        llm = self.bridge.llm
        if ask.messages is not None:
            ids = await asyncio.to_thread(llm.encode_chat, [message.plain() for message in ask.messages])
        else:
            ids = await asyncio.to_thread(llm.encode, ask.prompt or "")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.bridge.engine.capacity})

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens."""
        ask = await self._read(request, DetokenizeRequest)
        size = self.bridge.engine.model.vocab_size
        if wrong := [token for token in ask.tokens if not 0 <= token < size]:
            raise Refused(f"tokens holds {wrong[0]}; the model knows 0 to {size - 1}", "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self._plain, ask.tokens)})

    async def _answer(
        self, request: Request, ask: Sampling, mailbox: Mailbox, shape: Shape, num_prompt: int, *, hidden: bool = False
    ) -> Response:
        if ask.stream:
            options = ask.stream_options or StreamOptions()
            return EventStream(self.bridge, mailbox, shape, self.metrics.ended, options, num_prompt, hidden=hidden)
        return await whole_answer(request.receive, self.bridge, mailbox, shape, self.metrics.ended, hidden=hidden)

    async def _read(self, request: Request, kind: type[Asked]) -> Asked:
        """The body of a request, within bounds of size and time, as what it should be.

        Raises:
            QuantkitError: it is not, or names another model, or none is ready.
        """
        self._check_ready()
        try:
            body = await asyncio.wait_for(_body(request), BODY_SECONDS)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
        data = parse_object(body, "the body", RequestError, "send a JSON object")
        try:
            ask = kind.model_validate(data)
        except ValidationError as error:
            raise explain(error) from None
        self._check_name(getattr(ask, "model", None))
        return ask

    def _check_name(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise _UnknownModel(f"model {model[:100]!r} is not served here; {self.name!r} is")

    def _check_ready(self) -> None:
        if self.is_ending:
            raise _NotReady("the server ends; ask another")
        if not self.bridge.is_ready:
            raise _NotReady("the model is being loaded; try again later")

    async def _encoded(self, prompt: str | list[int]) -> list[int]:
        llm = self.bridge.llm
        if not isinstance(prompt, str):
            return self._bounded(prompt)
        if len(prompt) > _SHORT_TEXT:
            return self._bounded(await asyncio.to_thread(llm.encode, prompt))
        return self._bounded(llm.encode(prompt))

    def _bounded(self, ids: list[int]) -> list[int]:
        if self.max_prompt is not None and len(ids) > self.max_prompt:
            raise Refused(f"the prompt has {len(ids)} tokens; this server takes {self.max_prompt} at most", "prompt")
        return ids

    def _plain(self, ids: list[int]) -> str:
        return self.vocabulary.text(ids)

    async def _refuse(self, request: Request, problem: Exception) -> Response:
        """A refusal or a failure in OpenAI's shape."""
        # Messages for the operator of a command line name folders, which are not the client's business.
        status, body, headers = _explained(problem, hidden=str(self.bridge.llm.path), shown=self.name)
        self.metrics.rejected.labels(str(status)).inc()
        if status == 500 and self.log is not None:
            self.log(f"{request.method} {request.url.path}: {type(problem).__name__}: {problem}")
        return JSONResponse(body, status_code=status, headers=headers)


def _explained(problem: Exception, *, hidden: str, shown: str) -> tuple[int, answers.Json, dict[str, str]]:
    """Status, body and headers for whatever keeps a request from being answered."""
    text = str(problem).replace(hidden, shown)
    if isinstance(problem, HTTPException):
        return problem.status_code, answers.error(problem.detail), dict(problem.headers or {})
    if isinstance(problem, Busy):
        return 429, answers.error(text, kind="rate_limit_error"), {"Retry-After": str(problem.retry_s)}
    if isinstance(problem, _NotReady):
        return 503, answers.error(text, kind="server_error"), {"Retry-After": str(_NOT_READY_SECONDS)}
    if isinstance(problem, _TooLarge):
        return 413, answers.error(text), {"Connection": "close"}
    if isinstance(problem, _UnknownModel):
        return 404, answers.error(text, field="model", code="model_not_found"), {}
    if isinstance(problem, RequestError):
        return 400, answers.error(text, field=getattr(problem, "field", None)), {}
    if isinstance(problem, ClientDisconnect):
        return 499, {}, {}
    return 500, answers.error("the server failed on this request; its log says why", kind="server_error"), {}


async def _body(request: Request) -> bytes:
    """The body.

    Raises:
        _TooLarge: it is; the rest is not read.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


class _Doorkeeper:
    """Lets in who brings the key and is no page of others, and logs who came.

    Plain ASGI: Starlette's middleware costs every token.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        server, began, status = self._server, time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app_for(scope)
        try:
            await app(scope, receive, noted if server.log is not None else send)
        finally:
            if server.log is not None:
                client = (scope.get("client") or ("?",))[0]
                took = time.perf_counter() - began
                server.log(f"{client} {scope['method']} {scope['path'][:200]!r} {status} {took:.3f} s")

    def _app_for(self, scope: Scope) -> ASGIApp:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"origin", b"host")}
        origin, host = headers.get(b"origin"), headers.get(b"host")
        # Browsers send what needs no preflight for any page, and say where the page is from.
        if origin and not {origin, "*"} & {f"http://{host}", f"https://{host}", *self._server.origins}:
            return _foreigner
        return self._app if self._is_allowed(scope) else _stranger

    def _is_allowed(self, scope: Scope) -> bool:
        key = self._server.key
        if key is None or scope["path"] in _OPEN_PATHS:
            return True
        given: Any = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, word = given.partition(b" ")
        # In constant time: how long a comparison takes tells how much of a guess was right.
        return bool(hmac.compare_digest(word.strip(), key.encode())) and scheme.lower() == b"bearer"


async def _foreigner(scope: Scope, receive: Receive, send: Send) -> None:
    why = "pages of this origin may not ask; start the server with --allow-origin ORIGIN"
    body = answers.error(why, code="origin_not_allowed")
    await JSONResponse(body, status_code=403)(scope, receive, send)


async def _stranger(scope: Scope, receive: Receive, send: Send) -> None:
    body = answers.error("the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key")
    await JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
