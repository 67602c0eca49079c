"""`quantkit chat`: chat in the terminal, with the engine or with a server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import option_group, runtime_options, settings_of
from quantkit.cli._output import Command, Output, say
from quantkit.quantities import duration
from quantkit.runtime.types import SamplingParams

if TYPE_CHECKING:
    from quantkit.runtime.llm import LLM
    from quantkit.server.client import Remote

Messages = list[dict[str, Any]]
Answer = Callable[[Messages], Iterator[str]]  # pieces of text, as they come

_SAMPLING = settings_of(SamplingParams, "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
_HELP = "/reset forgets the conversation, /stats shows timings, /exit or Ctrl-D ends"


@dataclass(slots=True)
class _Conversation:
    """The messages of a conversation. *Mutable*.

    Args:
        system: system message; None = none.
        messages: messages so far.
        times: when the last question was asked, and when each piece of its answer arrived.
    """

    system: str | None
    messages: Messages = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answered(self, text: str, answer: Answer) -> Iterator[str]:
        """Add the user's message and yield the pieces of the answer; an incomplete answer is kept too."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        self.times = [time.perf_counter()]
        try:
            for piece in answer(self.messages):
                self.times.append(time.perf_counter())
                pieces.append(piece)
                yield piece
        except BaseException:
            if not pieces:
                self.messages.pop()  # otherwise the next request would have two user messages in a row
            raise
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})

    @property
    def stats(self) -> str:
        """Times of the last answer, as text."""
        if len(self.times) < 2:
            return "nothing was answered yet"
        asked, first, last = self.times[0], self.times[1], self.times[-1]
        speed = f", {(len(self.times) - 2) / (last - first):.1f} pieces/s" if last > first else ""
        return f"first text after {duration(first - asked)}, {len(self.times) - 1} pieces{speed}"


@click.command("chat", cls=Command, short_help="Chat with a model in the terminal.")
@click.argument("checkpoint", required=False)
@click.option("--url", metavar="URL", help="Chat with the server at this address, not with CHECKPOINT.")
@click.option("--system", metavar="TEXT", help="System message.")
@option_group("sampling", _SAMPLING, shown={"max_tokens": "as many as fit"})
@runtime_options
def command(
    output_to: Output,
    *,
    engine: dict[str, Any],
    checkpoint: str | None,
    url: str | None,
    system: str | None,
    sampling: dict[str, Any],
) -> None:
    """Chat with CHECKPOINT, a directory or a hub id, or with a server that has OpenAI's API.

    The checkpoint needs a chat template. /reset forgets the conversation, /stats shows timings, /exit or Ctrl-D ends.

    \b
    Examples:
      quantkit chat my-chat-model
      quantkit chat my-chat-model --kv-cache int8 --system "Be brief."
      quantkit chat --url http://127.0.0.1:8000
    """
    if (url is None) == (checkpoint is None):
        raise click.UsageError("give either CHECKPOINT or --url")
    if output_to.as_json:
        raise click.UsageError("chat cannot print JSON; use quantkit generate --chat --json")
    if url is not None and engine:
        raise click.UsageError("--url chats with a running server, so engine options do not apply; leave them out")
    answer = _from_server(url, sampling) if url is not None else _from_engine(checkpoint, engine, sampling)
    _talk(_Conversation(system), answer, output_to)


def _talk(conversation: _Conversation, answer: Answer, output_to: Output) -> None:
    from quantkit.errors import RequestError

    output_to.tell(_HELP)
    conversation.reset()
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
        elif text == "/stats":
            click.echo(conversation.stats)
        elif text.startswith("/"):
            say(_HELP)
        elif text:
            try:
                for piece in conversation.answered(text, answer):
                    click.echo(piece, nl=False)
            except KeyboardInterrupt:
                say(" (interrupted)")
            except RequestError as error:  # too long, or the server refused: the conversation goes on
                say(f"error: {error}")
            click.echo()


def _from_engine(checkpoint: str | None, engine: dict[str, Any], sampling: dict[str, Any]) -> Answer:
    from quantkit.runtime.llm import LLM

    params = SamplingParams(**{"max_tokens": None, **sampling})
    llm: LLM = LLM(checkpoint, max_sequences=1, lazy=True, **engine)
    llm.encode_chat([{"role": "user", "content": "Hi"}])  # reports a missing template before anything is loaded

    def answer(messages: Messages) -> Iterator[str]:
        for output in llm.stream(llm.encode_chat(messages), params):
            if output.text:
                yield output.text

    return answer


def _from_server(url: str, sampling: dict[str, Any]) -> Answer:
    import asyncio

    from quantkit.server.client import Remote

    body = {"temperature": 0.0, **sampling}

    def answer(messages: Messages) -> Iterator[str]:
        pieces = _pieces(Remote(url), {**body, "messages": messages})
        with asyncio.Runner() as runner:  # at its end it closes `pieces`, and so the connection
            while (piece := runner.run(_next(pieces))) is not None:
                yield piece

    return answer


async def _next(pieces: AsyncIterator[str]) -> str | None:
    return await anext(pieces, None)


async def _pieces(remote: Remote, body: dict[str, Any]) -> AsyncIterator[str]:
    async with remote:
        async for part in remote.stream("/v1/chat/completions", body):
            for choice in part.get("choices") or ():
                if text := (choice.get("delta") or {}).get("content"):
                    yield text
