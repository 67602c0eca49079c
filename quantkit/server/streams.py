"""Delivery of answers to clients, whole or as server-sent events; both stop when the client disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from quantkit.runtime.types import Completion
from quantkit.server.answers import Shape, counts, error, event, framed, usage
from quantkit.server.bridge import Bridge, ClientGone, Mailbox
from quantkit.server.schemas import StreamOptions

SEND_SECONDS = 60.0
"""Seconds that a client may take to read what was sent, before the server ends the stream."""

FAILED = error("the model failed on this request; see the server's log", kind="server_error")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers parts
]

OnEnd = Callable[[Completion], None]


@contextlib.asynccontextmanager
async def _watched(receive: Receive, bridge: Bridge, mailbox: Mailbox) -> AsyncIterator[None]:
    """Close the mailbox if the client disconnects during the block; after the block, cancel unfinished answers."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        mailbox.close()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()
        bridge.cancel(mailbox)


async def whole_answer(
    receive: Receive, bridge: Bridge, mailbox: Mailbox, shape: Shape, on_end: OnEnd, *, hidden: bool = False
) -> Response:
    """Wait until all answers of a request are complete, and return them in one JSON object.

    Args:
        receive: ASGI channel of the request.
        bridge, mailbox: connection to the engine, and the request's outputs.
        shape: format of the answer.
        on_end: called with each completion.
        hidden: whether to hide the token that the engine computes even if the client requests none.
    """
    done: dict[int, Completion] = {}
    try:
        async with _watched(receive, bridge, mailbox):
            while not mailbox.is_done:
                for index, output in await mailbox.read():
                    if output.completion is not None:
                        done[index] = output.completion
                        on_end(output.completion)
    except ClientGone:
        return Response(status_code=499)  # nginx's status for a lost client; nobody reads this response
    if any(completion.finish_reason == "error" for completion in done.values()):
        return JSONResponse(FAILED, status_code=500)
    choices = [shape.whole(index, done[index]) for index in sorted(done)]
    counted = usage(done, shape.num_samples, 0 if hidden else None)
    return JSONResponse(shape.head.around(choices, usage=counted))


@dataclass(frozen=True, slots=True)
class EventStream:
    """Streams the parts of an answer as they are computed, then `[DONE]`.

    Args:
        bridge, mailbox: connection to the engine, and the request's outputs.
        shape: format of the answer.
        on_end: called with each completion.
        options: options that say whether the last part or every part contains token counts.
        num_prompt: number of tokens of all prompts.
        hidden: whether to hide the token that the engine computes even if the client requests none.
    """

    bridge: Bridge
    mailbox: Mailbox
    shape: Shape
    on_end: OnEnd
    options: StreamOptions
    num_prompt: int
    hidden: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends, the client disconnects, or the client reads nothing for `SEND_SECONDS`."""
        with contextlib.suppress(ClientGone, TimeoutError):
            async with _watched(receive, self.bridge, self.mailbox):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                clock = asyncio.get_running_loop().time
                async with asyncio.timeout(None) as patience:
                    async for body in self._events():
                        patience.reschedule(clock() + SEND_SECONDS)
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                        patience.reschedule(None)
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self) -> AsyncIterator[bytes]:
        shape, done, options = self.shape, dict[int, Completion](), self.options
        num_new, frame = 0, self._frame(0)
        # Sent together with the first output, because clients would take an earlier part for the first token.
        body = b"".join(framed(frame, choice) for choice in shape.first())
        while not self.mailbox.is_done:
            for index, output in await self.mailbox.read():
                if output.completion is not None:
                    done[index] = output.completion
                    self.on_end(output.completion)
                    if output.completion.finish_reason == "error":
                        body += event(FAILED)
                        continue
                num_new += 0 if self.hidden else len(output.token_ids)
                if options.include_usage and options.continuous_usage_stats:
                    frame = self._frame(num_new)
                if (choice := shape.part(index, output)) is not None:
                    body += framed(frame, choice)
            if body:
                yield body
                body = b""
        if options.include_usage:
            yield event(shape.head.around([], usage=usage(done, shape.num_samples, 0 if self.hidden else None)))

    def _frame(self, num_new: int) -> tuple[bytes, bytes]:
        """Return the bytes around a choice after `num_new` new tokens."""
        head, options = self.shape.head, self.options
        if not options.include_usage:
            return head.frame()
        return head.frame(usage=counts(self.num_prompt, num_new) if options.continuous_usage_stats else None)
