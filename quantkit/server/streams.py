"""Answers on their way to clients: whole, or as server-sent events; both end when the client goes away."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from quantkit.runtime.types import Completion
from quantkit.server.answers import Shape, counts, error, event, framed, usage
from quantkit.server.bridge import Bridge, ClientGone, Mailbox
from quantkit.server.schemas import StreamOptions

SEND_SECONDS = 60.0
"""That a client may take to read what was sent before the next part waits for it."""

FAILED = error("the model failed on this request; the server's log says why", kind="server_error")

OnEnd = Callable[[Completion], None]


@contextlib.asynccontextmanager
async def _watched(receive: Receive, bridge: Bridge, mailbox: Mailbox) -> AsyncIterator[None]:
    """While open, a client that goes away closes the mailbox; afterwards nothing of the request is computed."""

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
    """One JSON object, when all prompts have ended.

    Args:
        receive: of the request.
        bridge, mailbox: where it is computed.
        shape: of the answer.
        on_end: told of each prompt.
        hidden: that a token had to be computed is not shown.
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
        return Response(status_code=499)  # as nginx calls it; nobody reads it
    if any(completion.finish_reason == "error" for completion in done.values()):
        return JSONResponse(FAILED, status_code=500)
    choices = [shape.whole(index, done[index]) for index in sorted(done)]
    return JSONResponse(shape.head.around(choices, usage=usage(done.values(), 0 if hidden else None)))


class EventStream(Response):
    """Parts of an answer as they are computed, then `[DONE]`.

    Args:
        bridge, mailbox: where it is computed.
        shape: of the answer.
        on_end: told of each prompt.
        options: whether a last part, or every part, counts tokens.
        num_prompt: tokens of all prompts.
        hidden: whether what was computed is not shown, since no token was asked for.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        bridge: Bridge,
        mailbox: Mailbox,
        shape: Shape,
        on_end: OnEnd,
        options: StreamOptions,
        num_prompt: int,
        *,
        hidden: bool,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # else nginx keeps parts until it has many
        self._bridge, self._mailbox, self._shape = bridge, mailbox, shape
        self._on_end, self._num_prompt, self._hidden = on_end, num_prompt, hidden
        self._with_usage = options.include_usage
        self._counts_parts = options.include_usage and options.continuous_usage_stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with contextlib.suppress(ClientGone):
            async with _watched(receive, self._bridge, self._mailbox):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                with _Patience() as patience:
                    async for body in self._events():
                        patience.since = patience.clock()
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                        patience.since = math.inf
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self) -> AsyncIterator[bytes]:
        shape, done = self._shape, list[Completion]()
        num_new, frame = 0, self._frame(0)
        # With the first news: what comes before them would pass for a first token.
        body = b"".join(framed(frame, choice) for choice in shape.first())
        while not self._mailbox.is_done:
            for index, output in await self._mailbox.read():
                if output.completion is not None:
                    done.append(output.completion)
                    self._on_end(output.completion)
                    if output.completion.finish_reason == "error":
                        body += event(FAILED)
                        continue
                num_new += 0 if self._hidden else len(output.token_ids)
                if self._counts_parts:
                    frame = self._frame(num_new)
                if (choice := shape.part(index, output)) is not None:
                    body += framed(frame, choice)
            if body:
                yield body
                body = b""
        if self._with_usage:
            yield event(shape.head.around([], usage=usage(done, 0 if self._hidden else None)))

    def _frame(self, num_new: int) -> tuple[bytes, bytes]:
        """Around a choice, when so many tokens have come."""
        if not self._with_usage:
            return self._shape.head.frame()
        return self._shape.head.frame(usage=counts(self._num_prompt, num_new) if self._counts_parts else None)


class _Patience:
    """While open, ends the task when it has been sending one part for long: its client does not read. *Mutable*.

    One timer for a whole answer: one for each part would cost as much as the part.

    Attributes:
        since: when the part that is being sent was begun, by the loop's clock; infinite between parts.
    """

    def __init__(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self.since, self.clock = math.inf, loop.time
        self._loop, self._task = loop, task

    def __enter__(self) -> "_Patience":
        self._check()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        due = min(self.since, self.clock()) + SEND_SECONDS
        if due <= self.clock():
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(due, self._check)
