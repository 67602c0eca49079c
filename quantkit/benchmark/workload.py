"""Requests sent to an engine, and the timestamps that a caller sees: arrival of each request and of each token.

Seeds are fixed, lengths are fixed or spread, and arrivals are a closed loop or Poisson. Prompts are random tokens, so
that no two requests share a prefix; the engine generates exactly the requested length. One thread runs the engine's
steps and reads the clock after each, so a timestamp is the time when the caller receives the tokens: gaps include
sampling, detokenization and bookkeeping. Tokens of one speculative step share a timestamp; ITL and TPOT spread the
time of the step evenly over them.
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

STATIC = "static-"  # prefix of the names of workloads in static batches
_SWEEP_PARTS = 6
_SWEEP_TOKENS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The requests of one workload, warm-up first.

    Args:
        workload: the workload.
        prompts: token ids of each request.
        new_tokens: number of tokens to generate for each request.
        due_s: seconds after the start at which each measured request is due; empty in a closed loop.
    """

    workload: Workload
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    due_s: tuple[float, ...]


def closed_loop(concurrency: int, *, num_requests: int | None = None, **sizes: int) -> Workload:
    """Return a workload with a constant number of requests in flight: each answer triggers the next request.

    Args:
        concurrency: requests in flight.
        num_requests: total number of requests; None = twice the concurrency, at least 4.
        sizes: `prompt_tokens` and `new_tokens` of each request, and the `seed` of the prompts.
    """
    count = max(4, 2 * concurrency) if num_requests is None else num_requests
    shape: dict[str, Any] = {"concurrency": concurrency, "num_warmup": min(concurrency, 2), **sizes}
    return Workload(name=f"closed-{concurrency}", mode="closed", num_requests=count, **shape)


def poisson(rate_per_s: float, *, num_requests: int | None = None, **sizes: int) -> Workload:
    """Return a workload with random arrivals at an average rate, independent of answers.

    Args:
        rate_per_s: arrivals per second.
        num_requests: total number of requests; None = 16.
        sizes: see `closed_loop`; the seed also determines the arrivals.
    """
    count = 16 if num_requests is None else num_requests
    shape: dict[str, Any] = {"rate_per_s": rate_per_s, "num_warmup": 2, **sizes}
    return Workload(name=f"poisson-{rate_per_s:g}", mode="poisson", num_requests=count, **shape)


def length_sweep(*, prompt_tokens: int, new_tokens: int, seed: int = 0) -> Workload:
    """Return a workload of single requests with prompts from short to long and back, as `fit_itl` and `fit_ttft` need.

    Args:
        prompt_tokens: tokens of the longest prompt.
        new_tokens: maximum number of new tokens per request.
        seed: seed of the prompts.
    """
    sizes = {"prompt_tokens": prompt_tokens, "new_tokens": min(new_tokens, _SWEEP_TOKENS), "seed": seed}
    alone = closed_loop(1, num_requests=2 * _SWEEP_PARTS, **sizes)
    return replace(alone, name=SWEEP_NAME)


def make_load(
    workload: Workload, vocab_size: int, *, avoid: Iterable[int] = (), spread: float = 0.0, turn: int = 0
) -> Load:
    """Build the requests of a workload; the same arguments give the same requests on every machine.

    Args:
        workload: the workload.
        vocab_size: tokens are drawn from 0 .. vocab_size - 1.
        avoid: tokens that are never drawn, e.g. end tokens.
        spread: lengths are drawn uniformly from (1 - spread) times the workload's length up to this length; 0 = all
            equal.
        turn: number of the repetition; each repetition has different prompts of the same lengths.
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
    """Return the seed of a workload's requests; a closed loop and static batches of the same size share a seed."""
    return f"{workload.seed} {workload.name.replace(STATIC, 'closed-')}"


def check_capacity(workloads: Sequence[Workload], capacity: int, what: str) -> None:
    """Check that the prompt and the answer of every request fit together into one sequence.

    Args:
        workloads: workloads to send.
        capacity: maximum number of tokens of one sequence.
        what: what limits `capacity`, e.g. "the context of demo".
    Raises:
        RequestError: a request does not fit; the message gives the largest length that fits.
    """
    for workload in workloads:
        prompt, new = workload.prompt_tokens, workload.new_tokens
        if prompt + new > capacity:
            flag, most = ("prompt", capacity - new) if new < capacity else ("new", capacity - 1)
            raise RequestError(
                f"prompts of {prompt} and answers of {new} tokens need {prompt + new} tokens, but {what} is {capacity} "
                f"tokens; --{flag}-tokens can be {most} at most"
            )


def _lengths(workload: Workload, number: int, chance: random.Random, spread: float) -> tuple[int, int]:
    """Return the numbers of prompt and answer tokens of a request; requests numbered below 0 are warm-up."""
    if workload.name == SWEEP_NAME:
        step = max(0, number) % (2 * _SWEEP_PARTS)
        # Lengths go up and down again: otherwise a drift of the machine would look like a slope.
        part = step + 1 if step < _SWEEP_PARTS else 2 * _SWEEP_PARTS - step  # 1 .. 6, 6 .. 1
        return max(1, workload.prompt_tokens * part // _SWEEP_PARTS), workload.new_tokens
    sizes = workload.prompt_tokens, workload.new_tokens
    drawn = [max(1, round(size * (1 - spread * chance.random()))) for size in sizes]
    return drawn[0], drawn[1]


def _arrivals(workload: Workload) -> tuple[float, ...]:
    """Return the seconds after the start at which the measured requests are due."""
    if workload.rate_per_s is None:
        return ()
    chance = random.Random(f"{workload.seed} {workload.name} arrivals")
    now, due = 0.0, []
    for _ in range(workload.num_requests):
        due.append(now)
        now += chance.expovariate(workload.rate_per_s)
    return tuple(due)


class SteppedEngine(Protocol):
    """An engine that can be measured: quantkit's or vLLM's."""

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int: ...
    def step(self) -> list[StepOutput]: ...


class Driver:
    """Sends requests to an engine and records timestamps. *Mutable*.

    Args:
        engine: engine to run.
        clock: function that returns seconds and never goes back.
        sleep: function that waits for a number of seconds.
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
        self._under_way: dict[int, tuple[float, list[float]]] = {}  # arrival and times of tokens, keyed by request

    @property
    def num_under_way(self) -> int:
        """Number of requests that have not ended."""
        return len(self._under_way)

    def send(self, prompt: Sequence[int], new_tokens: int, arrived_s: float | None = None) -> None:
        """Submit a request to the engine.

        Args:
            prompt: prompt token ids.
            new_tokens: number of tokens to generate, ignoring end tokens.
            arrived_s: time at which the request was due; None = now.
        """
        now = self.clock()
        # The clock is read first, so that the time in which the engine admits the request counts.
        number = self._engine.add(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        self._under_way[number] = (now if arrived_s is None else arrived_s), []

    def step(self) -> None:
        """Compute one step of the engine, and record when its tokens arrived."""
        outputs = self._engine.step()
        now = self.clock()
        for output in outputs:
            if output.request_id not in self._under_way:
                continue  # not sent by this driver
            arrived_s, token_s = self._under_way[output.request_id]
            token_s.extend([now] * len(output.token_ids))
            done = output.completion
            if done is None:
                continue
            del self._under_way[output.request_id]
            if done.finish_reason != "length":
                raise RequestError(
                    f"request {output.request_id} ended with {done.finish_reason!r} after {len(token_s)} tokens "
                    "instead of at its full length, so its timing would be misleading; measure again"
                )
            self.finished.append(replace(done.timing, arrived_s=arrived_s, token_s=tuple(token_s), finished_s=now))


def run_load(
    engine: SteppedEngine,
    load: Load,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> BenchmarkRun:
    """Send the requests of a load and record timestamps; in static batches if the workload says so.

    A static batch is sent only after the previous one has ended completely, as servers did before continuous batching.

    Args:
        engine: an idle engine.
        load: requests to send.
        clock, sleep: see `Driver`; tests replace them.
    Returns:
        The measured requests in order of sending, without warm-up.
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
    # Sorted by number: requests do not end in the order in which they were sent, and rounds are split by position.
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
    """Send each request when it is due, or after the current step; its latency counts from the due time."""
    start = driver.clock()
    waiting = deque(start + due for due in due_s)
    while waiting or driver.num_under_way:
        while waiting and waiting[0] <= driver.clock():
            # Latency counts from the due time: counted from sending, it would hide the queue of a slow engine.
            driver.send(*requests.popleft(), arrived_s=waiting.popleft())
        if driver.num_under_way:
            driver.step()
        elif waiting:
            driver.sleep(max(0.0, waiting[0] - driver.clock()))
