"""Who may come in: those who ask this server by its name, are no page of others, and bring the key."""

import hmac
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.server import answers

_OPEN_PATHS = ("/health", "/ready")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def known_hosts(host: str, allowed: tuple[str, ...]) -> frozenset[str]:
    """Names by which a server that only this machine reaches may be asked.

    A page of a stranger whose name leads to 127.0.0.1 asks by the stranger's name, and is of the same origin then.

    Args:
        host: that it listens on.
        allowed: further names.
    """
    return frozenset(map(_name_of, (*_LOCAL_NAMES, f"[{host}]" if ":" in host else host, *allowed)))


def _name_of(host: str) -> str:
    """The name in a `Host` header, without a port."""
    name, colon, port = host.strip().lower().rpartition(":")
    return (name if colon and "]" not in port else host.strip().lower()).rstrip(".")


class Doorkeeper:
    """Lets in who may, and logs who came.

    Plain ASGI: Starlette's middleware costs every token.

    Args:
        app: behind the door.
        key, log, origins, hosts: see `Server`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        log: Callable[[str], None] | None,
        origins: tuple[str, ...],
        hosts: frozenset[str] | None,
    ) -> None:
        self._app, self._key, self._log, self._origins, self._hosts = app, key, log, origins, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        log, began, status = self._log, time.perf_counter(), 0

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
        names = [name for name, _ in scope["headers"]]
        if b"content-length" in names and b"transfer-encoding" in names:
            return _ambiguous
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"origin", b"host")}
        origin, host = headers.get(b"origin"), headers.get(b"host")
        # HTTP/1.0 may come without a host, and no browser speaks it.
        if self._hosts is not None and host is not None and _name_of(host) not in self._hosts:
            return _misdirected
        # Browsers send what needs no preflight for any page, and say where the page is from.
        own = {f"http://{host}", f"https://{host}", *self._origins}
        if origin and (names.count(b"origin") > 1 or not {origin, "*"} & own):
            return _foreigner
        return self._app if self._is_allowed(scope) else _stranger

    def _is_allowed(self, scope: Scope) -> bool:
        key = self._key
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


async def _misdirected(scope: Scope, receive: Receive, send: Send) -> None:
    why = "this server is not known by the name in Host; ask it as localhost, or start it with --allow-host NAME"
    await JSONResponse(answers.error(why, code="host_not_allowed"), status_code=403)(scope, receive, send)


async def _ambiguous(scope: Scope, receive: Receive, send: Send) -> None:
    body = answers.error("Content-Length and Transfer-Encoding are both given; send one of them")
    await JSONResponse(body, status_code=400, headers={"Connection": "close"})(scope, receive, send)
