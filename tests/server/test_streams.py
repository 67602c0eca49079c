"""Test what a stream sends, and when."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from quantkit.results import RequestTiming
from quantkit.runtime.dialects.answer_parser import AnswerParser
from quantkit.runtime.dialects.dialect import find_dialect
from quantkit.runtime.types import Completion, StepOutput
from quantkit.server.answers import ChatShape
from quantkit.server.bridge import Mailbox
from quantkit.server.conversations import ChatRequest
from quantkit.server.schemas import StreamOptions
from quantkit.server.streams import EventStream


def chat(mailbox, ended):
    """Return the parts of the answer to a conversation."""
    ask = ChatRequest(messages=[{"role": "user", "content": "Hi"}], stream=True)
    shape = ChatShape(ask, [AnswerParser(find_dialect(None))], None, "tiny")
    options = StreamOptions(include_usage=True)
    return EventStream(None, mailbox, shape, ended.append, options, 1, hidden=False)._events()


def test_nothing_is_sent_before_the_first_token():
    """Clients that measure latency take the first part for the first token."""

    async def receive():
        mailbox = Mailbox(num_open=1)
        first = asyncio.ensure_future(anext(chat(mailbox, [])))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not first.done()
        mailbox.put(0, StepOutput(request_id=0, token_ids=(5,), text="Ho"))
        return await first

    events = asyncio.run(receive()).split(b"\n\n")
    assert [b'"role":"assistant"' in events[0], b'"content":"Ho"' in events[1]] == [True, True]


def test_what_comes_while_a_part_is_sent_is_sent_too():
    """The last token may arrive while a slow client is still receiving the token before it."""
    ended = []
    timing = RequestTiming(request_id=0, prompt_tokens=1, arrived_s=0.0, token_s=(1.0, 2.0))
    completion = Completion(
        prompt_token_ids=(1,), token_ids=(5, 6), text="Hoho", finish_reason="stop", logprobs=None, timing=timing,
        num_preemptions=0,
    )  # fmt: skip

    async def receive():
        mailbox = Mailbox(num_open=1)
        mailbox.put(0, StepOutput(request_id=0, token_ids=(5,), text="Ho"))
        parts = chat(mailbox, ended)
        sent = [await anext(parts)]
        mailbox.put(0, StepOutput(request_id=0, token_ids=(6,), text="ho", completion=completion))
        return b"".join([*sent, *[part async for part in parts]])

    answer = asyncio.run(receive())
    assert ended == [completion]
    assert b'"content":"ho"' in answer
    assert b'"finish_reason":"stop"' in answer
    assert b'"completion_tokens":2' in answer
