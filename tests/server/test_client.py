"""Test the client: no request is lost if the server has closed a kept-alive connection in the meantime."""

from __future__ import annotations

import asyncio

import pytest

from quantkit.errors import RequestError

aiohttp = pytest.importorskip("aiohttp")

from quantkit.server.client import Remote  # noqa: E402 - needs aiohttp

HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
ANSWER = HEADER + b'data: {"n": 1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("closed", "served"), [(0, True), (3, True), (5, False)])
def test_a_connection_that_is_closed_on_us_is_no_answer(closed, served, monkeypatch):
    monkeypatch.setattr("quantkit.server.client._KEPT", 4)
    asked = []

    async def answer(reader, writer):
        header = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(header.lower().partition(b"content-length:")[2].split()[0]))
        asked.append(1)
        writer.write(ANSWER if len(asked) > closed else b"")
        writer.close()

    async def talk():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, Remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m") as remote:
            return [part async for part in remote.stream("/v1/completions", {})]

    if served:
        assert asyncio.run(talk()) == [{"n": 1}]
    else:
        with pytest.raises(RequestError, match="ended the answer early: ServerDisconnectedError"):
            asyncio.run(talk())
    assert len(asked) == min(closed + 1, 5)
