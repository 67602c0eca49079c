"""Requests sent to the engine, and their times: fixed seeds, fixed or spread lengths, closed loop or Poisson arrivals.

Prompts are random tokens, so that no request shares a beginning with another; the engine stops at the asked length and
nowhere else. What was measured of them is the business of `latency`.
Source: Reddi et al. 2020, MLPerf Inference Benchmark (closed loop and server scenario).
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import RequestError
from quantkit.results import SWEEP_NAME, Workload

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
