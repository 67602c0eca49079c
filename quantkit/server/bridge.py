"""Connection between the asyncio side, which serves clients, and the one thread that loads and runs the model.

The asyncio side sends requests and cancellations through one queue. The thread returns the outputs of a step, for all
requests, in one callback on the event loop. Unread outputs wait in a mailbox, which holds at most the tokens of its own
request, so a slow client does not delay other clients.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from quantkit.errors import RequestError, first_line
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams, StepOutput
from quantkit.server.schemas import Refused

# A single step may fail because of its batch; if this many fail in a row, the device or the model no longer works.
_LOST_AFTER = 3
# Longest `Retry-After` that clients get; OpenAI's client ignores longer ones.
_LONGEST_WAIT_S = 60
_REMEMBERED_ENDS = 64

News = tuple[int, StepOutput]


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass(eq=False, slots=True)
class Mailbox:
    """Outputs for the answers of one HTTP request. *Mutable*; read on the asyncio side only.

    Args:
        num_open: number of answers that have not ended.
        numbers: number that the engine gave to each answer, keyed by index; used by the computing thread only.
    """

    num_open: int = 0
    numbers: dict[int, int] = field(default_factory=dict)
    _news: list[News] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended and all outputs have been read."""
        return not self.num_open and not self._news

    def put(self, index: int, output: StepOutput) -> None:
        """Store an output of an answer until it is read."""
        self.num_open -= output.completion is not None
        self._news.append((index, output))
        self._wake.set()

    def close(self) -> None:
        """Tell the reader that the client has disconnected."""
        self._closed = True
        self._wake.set()

    async def read(self) -> list[News]:
        """Wait for outputs and return all of them, each with the index of its answer.

        Raises:
            ClientGone: the client has disconnected.
        """
        await self._wake.wait()
        if self._closed:
            raise ClientGone
        self._wake.clear()
        news, self._news = self._news, []
        return news


@dataclass(frozen=True, slots=True)
class Addition:
    """An answer for the engine to compute.

    Args:
        mailbox: mailbox for the outputs of the answer.
        index: index of the answer in the request.
        ids: tokens of the prompt.
        params: sampling parameters.
        arrived_s: arrival time of the request, on the clock `time.perf_counter`.
    """

    mailbox: Mailbox
    index: int
    ids: list[int]
    params: SamplingParams
    arrived_s: float


class Bridge:
    """The thread that loads and runs the model, and the queue of its work. *Mutable*.

    Args:
        llm: model; must not be loaded yet, because the computing thread must load it.
        max_waiting: maximum number of requests that may wait while others run.
        say: called with each line for the operator.
    Attributes:
        failure: exception that ended the thread, for instance because the model cannot be loaded; None = no exception.
        num_open: number of answers that have not ended.
        most_open: maximum number of answers that may be open, waiting ones included.
    """

    def __init__(self, llm: LLM, *, max_waiting: int, say: Callable[[str], None]) -> None:
        self.llm = llm
        self.failure: BaseException | None = None
        self.num_open = 0
        self.num_failed_steps = 0  # in a row
        self.most_open = llm.config.max_sequences + max_waiting
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)  # when the last requests ended
        self._say = say
        self._engine: Engine | None = None
        self._mailboxes: dict[int, tuple[Mailbox, int]] = {}  # keyed by engine number; for the computing thread only
        # Further answers to a prompt, keyed by the first answer's number; they begin once they can share its pages.
        self._followers: dict[int, list[Addition]] = {}
        self._actions = SimpleQueue[Callable[[Engine], object]]()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None

    @property
    def is_lost(self) -> bool:
        """Whether so many steps in a row have failed that the server should be restarted."""
        return self.num_failed_steps >= _LOST_AFTER

    @property
    def engine(self) -> Engine:
        """The engine; it exists only after the model is loaded."""
        assert self._engine is not None, "the engine was requested before the model was loaded"
        return self._engine

    def start(self, loaded: Callable[[], None]) -> None:
        """Start the thread, which loads the model and then computes.

        Args:
            loaded: called on the event loop once the model is loaded or `failure` is set.
        """
        self._loop, self._loaded = asyncio.get_running_loop(), loaded
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step; unfinished requests are lost."""
        self._closing = True
        self._actions.put(lambda engine: None)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()

    def check_capacity(self, num_prompts: int, num_samples: int = 1) -> None:
        """Refuse a request if its answers would exceed the maximum number of open answers.

        Args:
            num_prompts: number of prompts in one request.
            num_samples: number of answers to each prompt.
        Raises:
            RequestError: the request needs more answers than may ever be open, or too many requests are waiting.
        """
        count = num_prompts * num_samples
        if count > self.most_open:
            what = f"{num_prompts} prompts" + (f" with {num_samples} answers each" if num_samples > 1 else "")
            raise RequestError(
                f"the request holds {what}; this server accepts at most {self.most_open} answers at once, so send "
                "several smaller requests"
            )
        if self.num_open + count > self.most_open:
            num_waiting = max(count, self.num_open - self.llm.config.max_sequences)
            retry_s = seconds_to_wait(self._ends, num_waiting, time.monotonic())
            text = f"{self.num_open} of at most {self.most_open} requests are running or waiting; try again later"
            raise Refused(text, status=429, retry_after=retry_s)

    def submit(self, prompts: Sequence[tuple[list[int], Sequence[SamplingParams]]]) -> Mailbox:
        """Queue all prompts of a request, or none if one is refused; return the mailbox for the outputs.

        Args:
            prompts: tokens of each prompt, and the sampling parameters of each of its answers, which differ only in
                seeds; all prompts have equally many answers.
        Raises:
            RequestError: see `Engine.add` and `check_capacity`.
        """
        num_samples = len(prompts[0][1])
        self.check_capacity(len(prompts), num_samples)
        for ids, several in prompts:
            self.engine.check(ids, several[0])
        mailbox, arrived_s = Mailbox(num_open=len(prompts) * num_samples), time.perf_counter()
        self.num_open += mailbox.num_open

        def add(engine: Engine) -> None:
            for at, (ids, several) in enumerate(prompts):
                first, *others = (
                    Addition(mailbox, at * num_samples + number, ids, params, arrived_s)
                    for number, params in enumerate(several)
                )
                number = self._enter(engine, first)
                if others:
                    self._followers[number] = others

        self._actions.put(add)
        return mailbox

    def _enter(self, engine: Engine, new: Addition) -> int:
        """Add an answer to the engine; return its number."""
        number = new.mailbox.numbers[new.index] = engine.add(new.ids, new.params, new.arrived_s)
        self._mailboxes[number] = new.mailbox, new.index
        return number

    def cancel(self, mailbox: Mailbox) -> None:
        """Cancel the unfinished answers of an HTTP request; their pages are free before the next step."""
        if not mailbox.num_open:
            return
        self._count_ended(mailbox.num_open)
        mailbox.num_open = 0

        def cancel(engine: Engine) -> None:
            for number in mailbox.numbers.values():
                self._followers.pop(number, None)
                if self._mailboxes.pop(number, None):
                    engine.cancel(number)

        self._actions.put(cancel)

    def _run(self) -> None:
        try:
            engine = self._engine = self.llm.engine
            self._tell(self._loaded)
            while not self._closing:
                self._turn(engine)
        except BaseException as error:  # the main thread reports it, with its exit code
            self.failure = error
            self._tell(self._loaded)

    def _turn(self, engine: Engine) -> None:
        """Handle queued requests and cancellations, then compute one step; wait if there is nothing to do."""
        if not engine.has_work:
            self._actions.get()(engine)
        while not self._actions.empty():
            self._actions.get()(engine)
        try:
            outputs = engine.step()
            if any(output.token_ids for output in outputs):
                self.num_failed_steps = 0
        except Exception as error:  # the next step returns the requests that ended
            self.num_failed_steps += 1
            cause = f"{type(error).__name__}: {first_line(error)}"
            self._say(f"a step failed, so all running requests end with an error: {cause}")
            return
        news = []
        for output in outputs:
            number = output.request_id
            # Removed with the last output, because entries of ended answers must not pile up over months.
            entry = self._mailboxes.pop(number, None) if output.completion else self._mailboxes.get(number)
            if entry is not None:
                news.append((*entry, output))
            for follower in self._followers.pop(number, ()):
                self._enter(engine, follower)
        if news:
            self._tell(self._deliver, news)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended before this thread
            self._closing = True

    def _deliver(self, news: list[tuple[Mailbox, int, StepOutput]]) -> None:
        for mailbox, index, output in news:
            if mailbox.num_open:  # otherwise the request has been cancelled
                if output.completion is not None:
                    self._count_ended(1)
                mailbox.put(index, output)

    def _count_ended(self, count: int) -> None:
        self.num_open -= count
        self._ends.extend([time.monotonic()] * count)
        if not self.num_open:  # idle time says nothing about the time that a request takes
            self._ends.clear()


def seconds_to_wait(ends: Sequence[float], num_waiting: int, now: float) -> int:
    """Return the number of seconds after which half of the waiting requests will have started, at the recent rate.

    Half, because the engine would be idle if clients waited until the queue is empty.

    Args:
        ends: end times of recent requests, ascending, on the clock of `now`.
        num_waiting: number of waiting requests.
        now: current time.
    """
    if len(ends) < 2 or now <= ends[0]:
        return 1
    per_second = (len(ends) - 1) / (now - ends[0])
    return min(max(1, math.ceil(num_waiting / 2 / per_second)), _LONGEST_WAIT_S)
