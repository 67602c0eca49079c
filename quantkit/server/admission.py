"""Admission of requests: which clients are allowed, and how much work a request body may cause.

Clients must address the server by a known host name and send the API key. Web pages of other origins are refused. A
large body can hold millions of values, and pydantic takes minutes and gigabytes to report an error for each. So the
values are counted in the raw bytes before parsing, and large bodies are parsed in another thread.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.errors import RequestError
from quantkit.machine.memory import release_freed_memory
from quantkit.safety.untrusted import parse_object
from quantkit.server import answers
from quantkit.server.schemas import Refused, Schema, explain_validation

MAX_BODY_BYTES = 1 << 24
BODY_SECONDS = 30.0
# Parsing and checking this many bytes takes at most a few milliseconds; larger bodies are handled in another thread.
_SMALL_BODY = 1 << 14
# Limit for all bodies together, so that many clients at once cannot fill the memory.
_HELD_BYTES = 1 << 26
_MOST_CONTAINERS, _MOST_ENTRIES, _MOST_VALUES, _MOST_IDS = 1 << 14, 1 << 16, 1 << 16, 1 << 20
_CHUNK = 1 << 20
_MOST_TRIALS = 16

Asked = TypeVar("Asked", bound=Schema)
Run = Callable[[Callable[[], Any]], Awaitable[Any]]


class Bodies:
    """Request bodies that the server holds in memory. *Mutable*.

    One thread parses large bodies one after another, so that only one body at a time needs the memory for parsing, and
    small requests do not wait. Another thread compiles clients' schemas to check them.
    """

    def __init__(self) -> None:
        self._num_bytes = self._num_trials = 0
        self._worker, self._trials = ThreadPoolExecutor(1, "bodies"), ThreadPoolExecutor(1, "schemas")

    @contextlib.asynccontextmanager
    async def opened(self, request: Request, kind: type[Asked], most_ids: int) -> AsyncIterator[tuple[Asked, Run]]:
        """Yield the checked request, and a function that runs further work on it in another thread.

        Work on large bodies runs in one shared thread. The body counts toward the memory limit until the context ends.

        Args:
            request: request whose body is read.
            kind: expected type of the body.
            most_ids: maximum number of token ids in one request.
        Raises:
            RequestError: the body is too large, arrives too slowly or is invalid.
        """
        try:
            body = await asyncio.wait_for(self._read(request), BODY_SECONDS)
        except TimeoutError:
            text = f"the request body did not arrive within {BODY_SECONDS:.0f} s; send it again, or in smaller requests"
            raise RequestError(text) from None
        size = len(body)
        try:
            check = partial(_checked, body, kind, min(_MOST_IDS, max(_MOST_VALUES, most_ids)))
            del body
            is_small = size <= _SMALL_BODY
            ask = check() if is_small else await self._beside(check)
            del check
            yield ask, asyncio.to_thread if is_small else self._beside
        finally:
            self._num_bytes -= size
            if size > _CHUNK:
                release_freed_memory()

    async def try_out(self, trial: Callable[[], None]) -> None:
        """Run `trial`, a function that compiles a client's schema to check it, in the thread for schemas.

        Raises:
            Refused: too many schemas are being compiled.
        """
        if self._num_trials >= _MOST_TRIALS:
            text = f"{self._num_trials} schemas are being compiled; try again later"
            raise Refused(text, status=429, retry_after=1)
        self._num_trials += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._trials, trial)
        finally:
            self._num_trials -= 1

    async def _beside(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        """Drop queued work, and end both threads once their current work is done."""
        for worker in (self._worker, self._trials):
            worker.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: Request) -> bytes:
        size, parts = 0, []
        try:
            async for part in request.stream():
                size += len(part)
                self._num_bytes += len(part)
                if size > MAX_BODY_BYTES:
                    text = f"the request body has more than {MAX_BODY_BYTES} bytes; send less in one request"
                    raise Refused(text, status=413, connection="close")
                if size > _SMALL_BODY and self._num_bytes > _HELD_BYTES:
                    text = f"the request bodies in the server's memory exceed {_HELD_BYTES >> 20} MiB; try again later"
                    raise Refused(text, status=429, retry_after=1)
                parts.append(part)
        except BaseException:
            self._num_bytes -= size
            raise
        return b"".join(parts)


def _checked(body: bytes, kind: type[Asked], most_ids: int) -> Asked:
    _check_counts(body, most_ids if kind.takes_ids else _MOST_VALUES)
    data = parse_object(body, "the body", RequestError, "send a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explain_validation(error) from None


def _check_counts(body: bytes, most_values: int) -> None:
    """Refuse a request body with more lists, objects, entries or values than any valid request has.

    Raises:
        RequestError: the body exceeds one of these limits.
    """
    limits = {b"[{": (_MOST_CONTAINERS, "lists and objects"), b":": (_MOST_ENTRIES, "entries of objects")}
    limits[b","] = (most_values, "values")
    # Marks inside strings do not count. But if the number of all marks is within the limits, strings are not searched.
    if all(sum(map(body.count, marks)) <= most for marks, (most, _) in limits.items()):
        return
    counts = dict.fromkeys(limits, 0)
    for chunk in _outside_texts(body):
        for marks, (most, what) in limits.items():
            counts[marks] += sum(int(np.count_nonzero(chunk == mark)) for mark in marks)
            if counts[marks] > most:
                raise RequestError(f"the request body holds more than {most} {what}; send less in one request")


def _outside_texts(body: bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yield the bytes of JSON chunk by chunk, with bytes inside strings set to zero."""
    if b"\\" in body:  # a quote after a backslash does not end a string
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    inside = np.uint8(0)
    for start in range(0, len(body), _CHUNK):
        chunk = np.frombuffer(body, np.uint8, min(_CHUNK, len(body) - start), start)
        is_inside = np.bitwise_xor.accumulate((chunk == ord('"')).view(np.uint8)) ^ inside
        inside = is_inside[-1]
        yield chunk * (is_inside ^ 1)


_OPEN_PATHS = ("/health", "/ready")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def known_hosts(host: str, allowed: tuple[str, ...]) -> frozenset[str]:
    """Return the host names accepted by a server that only this machine can reach.

    Without a check of host names, a foreign web page whose domain resolves to 127.0.0.1 would count as the same origin
    (DNS rebinding).

    Args:
        host: address that the server listens on.
        allowed: additional names to accept.
    """
    return frozenset(map(_name_of, (*_LOCAL_NAMES, f"[{host}]" if ":" in host else host, *allowed)))


def _name_of(host: str) -> str:
    """Return the name in a `Host` header, without the port."""
    name, colon, port = host.strip().lower().rpartition(":")
    return (name if colon and "]" not in port else host.strip().lower()).rstrip(".")


@dataclass(frozen=True, kw_only=True, slots=True)
class Doorkeeper:
    """Checks clients before the application runs, and logs requests.

    It is plain ASGI, because Starlette's middleware would add a cost to every token.

    Args:
        app: application to protect.
        key, log, origins, hosts: see `Server`.
    """

    app: ASGIApp
    key: str | None
    log: Callable[[str], None] | None
    origins: tuple[str, ...]
    hosts: frozenset[str] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        log, began, status = self.log, time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app_for(scope)
        try:
            await app(scope, receive, noted if log is not None else send)
        finally:
            if log is not None:
                client = (scope.get("client") or ("?",))[0]
                took = time.perf_counter() - began
                log(f"{client} {scope['method']} {scope['path'][:200]!r} {status} {took:.3f} s")

    def _app_for(self, scope: Scope) -> ASGIApp:
        """Return the application, or the response that says why the client is refused."""
        names = [name for name, _ in scope["headers"]]
        if b"content-length" in names and b"transfer-encoding" in names:
            text = "the headers Content-Length and Transfer-Encoding are both given; send only one of them"
            return JSONResponse(answers.error(text), status_code=400, headers={"Connection": "close"})
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"origin", b"host")}
        origin, host = headers.get(b"origin"), headers.get(b"host")
        # HTTP/1.0 requests may lack the Host header, but no browser sends such requests.
        if self.hosts is not None and host is not None and _name_of(host) not in self.hosts:
            text = (
                "this server does not accept the host name in the Host header; use localhost in the URL, or start the "
                "server with --allow-host NAME"
            )
            return JSONResponse(answers.error(text, code="host_not_allowed"), status_code=403)
        # A browser sends requests without a preflight on behalf of any page, but it names the page's origin.
        own = {f"http://{host}", f"https://{host}", *self.origins}
        if origin and (names.count(b"origin") > 1 or not {origin, "*"} & own):
            text = (
                "web pages of this origin may not send requests to this server; to allow them, start the server with "
                "--allow-origin ORIGIN"
            )
            return JSONResponse(answers.error(text, code="origin_not_allowed"), status_code=403)
        if self._is_allowed(scope):
            return self.app
        text = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
        body = answers.error(text, code="invalid_api_key")
        return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})

    def _is_allowed(self, scope: Scope) -> bool:
        key = self.key
        if key is None or scope["path"] in _OPEN_PATHS:
            return True
        given: Any = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, word = given.partition(b" ")
        # In constant time, because the time of an ordinary comparison tells how much of a guess was right.
        return bool(hmac.compare_digest(word.strip(), key.encode())) and scheme.lower() == b"bearer"
