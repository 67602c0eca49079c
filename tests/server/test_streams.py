"""What is sent when."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from quantkit.runtime.types import StepOutput
from quantkit.server.bridge import Mailbox
from quantkit.server.schemas import ChatRequest, StreamOptions
from quantkit.server.shapes import ChatShape
from quantkit.server.streams import EventStream


def test_nothing_is_sent_before_the_first_token():
    """Clients that measure take the first part for the first token."""

    async def receive():
        mailbox = Mailbox(num_open=1)
        shape = ChatShape(ChatRequest(messages=[{"role": "user", "content": "Hi"}], stream=True), None, "tiny")
        parts = EventStream(None, mailbox, shape, None, StreamOptions(), 1)._events()
        first = asyncio.ensure_future(anext(parts))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not first.done()
        mailbox.put(0, StepOutput(request_id=0, token_ids=(5,), text="Ho"))
        return await first

    events = asyncio.run(receive()).split(b"\n\n")
    assert [b'"role":"assistant"' in events[0], b'"content":"Ho"' in events[1]] == [True, True]
