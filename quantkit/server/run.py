"""Run a server: bind the address, load the model, serve, finish open requests, end."""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quantkit.errors import InputError
from quantkit.machine.system import max_open_files
from quantkit.server.app import Server

HEAD_SECONDS = 10.0
"""Seconds that a client may take to send headers, counted from connecting or from the first byte of a
further request.
"""

_FEWEST = 1024
_LINE = 2048  # connections that the kernel queues until the server accepts them


class Connection(H11Protocol):
    """A connection that is closed if its client is slow to send headers. *Mutable*.

    Args:
        most: maximum number of connections of the server. A new connection beyond this number closes the connection
            that has waited longest for a request, or itself if no connection is waiting.
        waiting: connections waiting for a request, longest wait first. *Mutable*, shared by all connections.
        arguments: arguments of uvicorn.
    """

    def __init__(self, most: int, waiting: dict["Connection", None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._most, self._waiting = most, waiting
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Override asyncio's callback."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            next(iter(self._waiting), self).drop()
        if not transport.is_closing():
            self._waiting[self] = None
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.drop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Override asyncio's callback."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Override asyncio's callback."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.drop)

    def on_response_complete(self) -> None:
        """Override uvicorn's callback."""
        super().on_response_complete()
        # If not idle, the client's next request has already begun.
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._waiting[self] = None

    def drop(self) -> None:
        """Close the connection without an answer."""
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def most_connections(most_open: int) -> tuple[int, int]:
    """Return the maximum number of connections, and how many to accept at once, within this process's limit of open
    files.

    Args:
        most_open: maximum number of requests that may run or wait.
    """
    files = max_open_files()
    # Dropped connections keep their files for a few rounds of the event loop, so a round opens only a few.
    return min(max(_FEWEST, 2 * most_open), files // 2), min(_LINE, files // 16)


DRAIN_SECONDS = 25
"""Default seconds to finish open requests at shutdown; less than the 30 s after which Kubernetes kills the process."""

_INTERRUPTED = 128 + signal.SIGINT


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        InputError: the address does not exist or is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Name the protocol, because asyncio switches off Nagle's algorithm only for such sockets. Otherwise the first
        # tokens of a stream would wait 40 ms for the client's acknowledgement.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address[:2])
            listening.listen(_LINE)
        except BaseException:
            listening.close()
            raise
        return listening
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None


def is_public(host: str) -> bool:
    """Whether other machines can reach the address."""
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(host).is_loopback
    return host != "localhost"


class HttpServer(uvicorn.Server):
    """uvicorn with a shutdown that answers open requests and exits with code 0.

    Args:
        server: server whose bridge has not been started.
        say: called with lines of text for the operator, such as that the model is loaded.
        drain_seconds: maximum seconds to finish open requests at shutdown.
    """

    def __init__(self, server: Server, say: Callable[[str], None], drain_seconds: int = DRAIN_SECONDS) -> None:
        most, at_once = most_connections(server.bridge.most_open)
        config = uvicorn.Config(
            server.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,  # longer than load balancers keep idle connections
            # h11, because httptools, which uvicorn prefers if it is installed, does not limit headers.
            http=partial(Connection, most, {}),  # type: ignore[arg-type]
            backlog=at_once,
            timeout_graceful_shutdown=drain_seconds,
            h11_max_incomplete_event_size=1 << 16,
        )
        super().__init__(config)
        self._server, self._say, self._drain_seconds = server, say, drain_seconds

    def run_until_ended(self, listening: socket.socket) -> None:
        """Load the model and serve until SIGTERM or SIGINT; open requests are answered first.

        A second SIGINT ends the process at once.

        Args:
            listening: socket to serve on.
        Raises:
            BaseException: the exception that ended the computing thread, such as a model that cannot be loaded.
        """
        asyncio.run(self._run(listening))
        if self._server.bridge.failure is not None:
            raise self._server.bridge.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, but with a longer queue of connections in the kernel.

        uvicorn uses one number for the length of this queue and for the connections accepted at once.
        """
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_LINE)

    def end(self) -> None:
        """Refuse new requests, answer open ones, and make `run_until_ended` return."""
        is_first = not self.should_exit
        self._server.is_ending = self.should_exit = True  # set first: a reader of the message may signal again
        if is_first:
            count = self._server.bridge.num_open
            self._say(
                f"shutting down: {count} open requests are answered first, for at most {self._drain_seconds} "
                "s; press Ctrl-C to end at once"
            )

    async def _run(self, listening: socket.socket) -> None:
        bridge = self._server.bridge
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host

        def loaded() -> None:
            if bridge.failure is not None:
                self.should_exit = self.force_exit = True
            else:
                self._say(f"{self._server.name} is ready at http://{address}:{port}/v1")

        bridge.start(loaded)
        await self.serve(sockets=[listening])
        if bridge.num_open:
            self._say(f"{bridge.num_open} requests did not finish within {self._drain_seconds} s and were cut off")
        self._server.bodies.close()
        bridge.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Handle SIGINT and SIGTERM inside the `with` block; uvicorn would raise them again after a clean shutdown."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
            yield
            return
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.should_exit:
            os._exit(_INTERRUPTED)
        self.end()
