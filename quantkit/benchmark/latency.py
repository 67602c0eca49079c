"""Sends a load to an engine and keeps what a caller sees: when each request arrived and when each token came out.

One thread drives the engine's steps and reads the clock after each, so a timestamp is the moment at which the tokens of
a step are in the caller's hands: sampling, detokenization and bookkeeping are inside the gaps. Tokens of one
speculative burst share a timestamp; ITL counts the gaps between them as zero, TPOT spreads the burst.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from quantkit.benchmark.workload import STATIC, Load
from quantkit.errors import RequestError
from quantkit.results import BenchmarkRun, RequestTiming
from quantkit.runtime.types import SamplingParams, StepOutput


class SteppedEngine(Protocol):
    """The engine that is measured: ours, or vLLM."""

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int: ...
    def step(self) -> list[StepOutput]: ...


class Driver:
    """Keeps the clock while requests are under way. *Mutable*.

    Args:
        engine: to drive.
        clock: seconds, never going back.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clock, self.sleep = clock, sleep
        self.finished: list[RequestTiming] = []
        self._engine = engine
        self._under_way: dict[int, tuple[float, list[float]]] = {}  # arrival and tokens by number, seconds

    @property
    def num_under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._under_way)

    def send(self, prompt: Sequence[int], new_tokens: int, arrived_s: float | None = None) -> None:
        """Hand a request to the engine.

        Args:
            prompt: its tokens.
            new_tokens: to generate, end tokens or not.
            arrived_s: when it was due; None = now.
        """
        now = self.clock()
        # The clock is read before, so that the engine's own admission counts for the request.
        number = self._engine.add(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        self._under_way[number] = (now if arrived_s is None else arrived_s), []

    def step(self) -> None:
        """One step of the engine, and the time at which its tokens were there."""
        outputs = self._engine.step()
        now = self.clock()
        for output in outputs:
            if output.request_id not in self._under_way:
                continue  # somebody else's
            arrived_s, token_s = self._under_way[output.request_id]
            token_s.extend([now] * len(output.token_ids))
            done = output.completion
            if done is None:
                continue
            del self._under_way[output.request_id]
            if done.finish_reason != "length":
                raise RequestError(
                    f"request {output.request_id} ended with {done.finish_reason!r} after {len(token_s)} tokens "
                    "instead of at its length; its time would mislead"
                )
            self.finished.append(replace(done.timing, arrived_s=arrived_s, token_s=tuple(token_s), finished_s=now))


def run_load(
    engine: SteppedEngine,
    load: Load,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> BenchmarkRun:
    """Send the requests of a load and time them; in static batches where its name says so.

    The next batch is then sent only when all of the one before has ended, as servers did before continuous batching.

    Args:
        engine: an idle engine.
        load: what to send.
        clock, sleep: for tests.
    Returns:
        the measured requests in order of sending; warm-up is left out.
    """
    driver = Driver(engine, clock, sleep)
    requests = deque(zip(load.prompts, load.new_tokens, strict=True))
    for _ in range(load.workload.num_warmup):
        driver.send(*requests.popleft())
    while driver.num_under_way:
        driver.step()
    # Warm-up pays for first-time work such as compilation, which says nothing about serving.
    driver.finished.clear()
    if load.due_s:
        _arrive(driver, requests, load.due_s)
    else:
        _in_a_loop(driver, requests, load.workload.concurrency or 1, load.workload.name.startswith(STATIC))
    # By number, because requests do not end in the order in which they were sent, and rounds are split by position.
    timings = sorted(driver.finished, key=lambda timing: timing.request_id)
    return BenchmarkRun(workload=load.workload, requests=tuple(timings))


Requests = deque[tuple[tuple[int, ...], int]]


def _in_a_loop(driver: Driver, requests: Requests, concurrency: int, static: bool) -> None:
    while requests or driver.num_under_way:
        while requests and driver.num_under_way < concurrency:
            driver.send(*requests.popleft())
        driver.step()
        while static and driver.num_under_way:
            driver.step()


def _arrive(driver: Driver, requests: Requests, due_s: Sequence[float]) -> None:
    """Each request is sent when it is due, or as soon after that as a running step allows; it counts from when due."""
    start = driver.clock()
    waiting = deque(start + due for due in due_s)
    while waiting or driver.num_under_way:
        while waiting and waiting[0] <= driver.clock():
            # From when it was due: counted from when it was sent, a slow engine hides the queue that it makes.
            driver.send(*requests.popleft(), arrived_s=waiting.popleft())
        if driver.num_under_way:
            driver.step()
        elif waiting:
            driver.sleep(max(0.0, waiting[0] - driver.clock()))
