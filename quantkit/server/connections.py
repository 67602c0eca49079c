"""Connections: how many there are, and how long one may take to say what it wants."""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""That a client may take from connecting, or from the first byte of a further request, to the end of the headers."""

_FEWEST = 1024


class Connections:
    """The connections of a server that wait for a request, the one that waits longest first. *Mutable*.

    Args:
        most: connections; a new one beyond them takes the place of the one that waits longest.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: dict[Connection, None] = {}

    def protocol(self, **arguments: Any) -> "Connection":
        """One more; uvicorn's arguments."""
        return Connection(self, **arguments)


class Connection(H11Protocol):
    """A connection that does not wait for its client's headers for ever. *Mutable*.

    Args:
        group: that it is one of.
        arguments: of uvicorn's.
    """

    def __init__(self, group: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._group = group
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Overrides asyncio."""
        super().connection_made(transport)
        if len(self.connections) > self._group.most:
            next(iter(self._group.waiting), self).drop()
        if not transport.is_closing():
            self._group.waiting[self] = None
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.drop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Overrides asyncio."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Overrides asyncio."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.drop)

    def on_response_complete(self) -> None:
        """Overrides uvicorn."""
        super().on_response_complete()
        # A request that came behind the last one has begun already.
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._group.waiting[self] = None

    def drop(self) -> None:
        """End it without an answer."""
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _forget(self) -> None:
        self._group.waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def most_connections(most_open: int) -> tuple[int, int]:
    """Connections that a server can have, and that it may take at once, within this process's limit of open files.

    Args:
        most_open: requests that are computed or wait.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(max(_FEWEST, 2 * most_open), files // 2), min(2048, files // 4)
