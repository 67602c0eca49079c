"""Requests sent to an engine, and what a caller sees of them: when each arrived and when each token came out.

Seeds are fixed, lengths fixed or spread, arrivals a closed loop or Poisson. Prompts are random tokens, so that no
request shares a beginning with another; the engine stops at the asked length and nowhere else.
One thread drives the engine's steps and reads the clock after each, so a timestamp is the moment at which the tokens of
a step are in the caller's hands: sampling, detokenization and bookkeeping are inside the gaps. Tokens of one
speculative burst share a timestamp; ITL counts the gaps between them as zero, TPOT spreads the burst.
Source: Reddi et al. 2020, MLPerf Inference Benchmark (closed loop and server scenario).
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from quantkit.errors import RequestError
from quantkit.results import SWEEP_NAME, BenchmarkRun, RequestTiming, Workload
from quantkit.runtime.types import SamplingParams, StepOutput

STATIC = "static-"  # what names of workloads in static batches begin with
_SWEEP_PARTS = 6
_SWEEP_TOKENS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The requests of one workload, warm-up first.

    Args:
        workload: what was asked for.
        prompts: token ids of each request.
        new_tokens: to generate, of each request.
        due_s: when each that is measured is due after the start; empty in a closed loop.
    """

    workload: Workload
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    due_s: tuple[float, ...]


def closed_loop(concurrency: int, *, num_requests: int | None = None, **sizes: int) -> Workload:
    """So many requests in flight at any time: the next is sent when one is answered.

    Args:
        concurrency: requests in flight.
        num_requests: in all; None = twice the concurrency, at least 4.
        sizes: `prompt_tokens` and `new_tokens` of each, and the `seed` of the prompts.
    """
    count = max(4, 2 * concurrency) if num_requests is None else num_requests
    shape: dict[str, Any] = {"concurrency": concurrency, "num_warmup": min(concurrency, 2), **sizes}
    return Workload(name=f"closed-{concurrency}", mode="closed", num_requests=count, **shape)


def poisson(rate_per_s: float, *, num_requests: int | None = None, **sizes: int) -> Workload:
    """Requests arrive by chance, so many per second on average, whether or not others are answered.

    Args:
        rate_per_s: arrivals per second.
        num_requests: in all; None = 16.
        sizes: see `closed_loop`; the seed is also that of the arrivals.
    """
    count = 16 if num_requests is None else num_requests
    shape: dict[str, Any] = {"rate_per_s": rate_per_s, "num_warmup": 2, **sizes}
    return Workload(name=f"poisson-{rate_per_s:g}", mode="poisson", num_requests=count, **shape)


def length_sweep(*, prompt_tokens: int, new_tokens: int, seed: int = 0) -> Workload:
    """One request at a time, prompts from short to long and back: what the two fits need.

    Args:
        prompt_tokens: of the longest.
        new_tokens: at most so many of each.
        seed: of the prompts.
    """
    sizes = {"prompt_tokens": prompt_tokens, "new_tokens": min(new_tokens, _SWEEP_TOKENS), "seed": seed}
    alone = closed_loop(1, num_requests=2 * _SWEEP_PARTS, **sizes)
    return replace(alone, name=SWEEP_NAME)


def make_load(
    workload: Workload, vocab_size: int, *, avoid: Iterable[int] = (), spread: float = 0.0, turn: int = 0
) -> Load:
    """The requests themselves; the same arguments make the same requests on every machine.

    Args:
        workload: what to send.
        vocab_size: tokens are drawn from 0 .. vocab_size - 1.
        avoid: tokens that are never drawn, e.g. those that end a text.
        spread: lengths are drawn evenly from (1 - spread) times the workload's up to it; 0 = all alike.
        turn: number of the repetition; each gets other prompts, of the same lengths.
    """
    key = request_key(workload)
    # Two generators, so that lengths stay the same over turns while prompts change.
    lengths = random.Random(f"{key} lengths")
    chance = random.Random(f"{key} tokens {turn}")
    tokens = sorted(set(range(vocab_size)).difference(avoid))
    prompts, new_tokens = [], []
    for number in range(workload.num_warmup + workload.num_requests):
        prompt_length, new_length = _lengths(workload, number - workload.num_warmup, lengths, spread)
        prompts.append(tuple(chance.choices(tokens, k=prompt_length)))
        new_tokens.append(new_length)
    due_s = _arrivals(workload)
    return Load(workload=workload, prompts=tuple(prompts), new_tokens=tuple(new_tokens), due_s=due_s)


def request_key(workload: Workload) -> str:
    """Key of the random requests: equal for a closed loop and the static batches it is compared with."""
    return f"{workload.seed} {workload.name.replace(STATIC, 'closed-')}"


def check_capacity(workloads: Sequence[Workload], capacity: int, what: str) -> None:
    """Every request fits.

    Args:
        workloads: what will be sent.
        capacity: tokens of one sequence.
        what: says what limits it, e.g. "the context of demo".
    Raises:
        RequestError: the message says what would fit.
    """
    for workload in workloads:
        prompt, new = workload.prompt_tokens, workload.new_tokens
        if prompt + new > capacity:
            flag, most = ("prompt", capacity - new) if new < capacity else ("new", capacity - 1)
            raise RequestError(
                f"prompts of {prompt} tokens and {new} new ones need {prompt + new}, but {what} is {capacity} tokens; "
                f"--{flag}-tokens can be {most} at most"
            )


def _lengths(workload: Workload, number: int, chance: random.Random, spread: float) -> tuple[int, int]:
    """Tokens of prompt and answer of a request; numbers below 0 are warm-up."""
    if workload.name == SWEEP_NAME:
        step = max(0, number) % (2 * _SWEEP_PARTS)
        # Up and down again: otherwise a drift of the machine passes for a slope.
        part = step + 1 if step < _SWEEP_PARTS else 2 * _SWEEP_PARTS - step  # 1 .. 6, 6 .. 1
        return max(1, workload.prompt_tokens * part // _SWEEP_PARTS), workload.new_tokens
    sizes = workload.prompt_tokens, workload.new_tokens
    drawn = [max(1, round(size * (1 - spread * chance.random()))) for size in sizes]
    return drawn[0], drawn[1]


def _arrivals(workload: Workload) -> tuple[float, ...]:
    """Seconds after the start at which the measured requests are due."""
    if workload.rate_per_s is None:
        return ()
    chance = random.Random(f"{workload.seed} {workload.name} arrivals")
    now, due = 0.0, []
    for _ in range(workload.num_requests):
        due.append(now)
        now += chance.expovariate(workload.rate_per_s)
    return tuple(due)


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
