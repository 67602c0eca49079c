"""What a KV cache saves: the same text generated with it, and by computing the whole context again for every token.

Recomputing uses the same engine, kernels and chunks: every token is a request of its own whose prompt is everything
before it. So the difference is the cache and nothing else. Prefix caching has to be off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.benchmark.latency import Driver, Steppable
from quantkit.results import RequestTiming
from quantkit.runtime.types import SamplingParams

_MARKS = (1, 10, 30, 100, 300, 1000, 3000, 10_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Seconds until so many tokens were there, with the cache and without."""

    new_tokens: int
    cached_s: float
    recomputed_s: float

    @property
    def ratio(self) -> float:
        """How much longer it takes without."""
        return self.recomputed_s / self.cached_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheComparison:
    """Both ways to the same text.

    Args:
        cached, recomputed: timestamps.
        num_same: new tokens from the first on that are the same both ways; ties may part them, batches round alike.
    """

    cached: RequestTiming
    recomputed: RequestTiming
    num_same: int

    def marks(self) -> list[Mark]:
        """At 1, 10, 30, 100, 300, ... tokens and at the end."""
        count = self.cached.num_new_tokens
        return [
            Mark(
                new_tokens=number,
                cached_s=self.cached.token_s[number - 1] - self.cached.arrived_s,
                recomputed_s=self.recomputed.token_s[number - 1] - self.recomputed.arrived_s,
            )
            for number in [*(mark for mark in _MARKS if mark < count), count]
        ]


def compare_cache(
    engine: Steppable, prompt: Sequence[int], new_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> CacheComparison:
    """Generate greedily both ways.

    Args:
        engine: idle, with its prefix cache off.
        prompt: token ids.
        new_tokens: to generate.
        progress: told the number of tokens recomputed so far.
    """
    generate_by_recomputing(engine, prompt, 2)  # warm-up
    driver = Driver(engine)
    ids = _generate(engine, prompt, 2)
    driver.send(prompt, new_tokens)
    driver.drain()
    ids, recomputed = generate_by_recomputing(engine, prompt, new_tokens, progress)
    again = _generate(engine, prompt, new_tokens)
    same = next((i for i, (a, b) in enumerate(zip(ids, again, strict=True)) if a != b), new_tokens)
    return CacheComparison(cached=driver.finished[0], recomputed=recomputed, num_same=same)


def generate_by_recomputing(
    engine: Steppable, prompt: Sequence[int], new_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[int], RequestTiming]:
    """Greedy tokens, each from a prefill of everything before it, and when they came."""
    clock = Driver(engine).clock
    ids, times = list(prompt), []
    start = clock()
    for _ in range(new_tokens):
        ids.extend(_generate(engine, ids, 1))
        times.append(clock())
        progress(len(times))
    timing = RequestTiming(
        request_id=0, prompt_tokens=len(prompt), arrived_s=start, token_s=tuple(times), finished_s=times[-1]
    )
    return ids[len(prompt) :], timing


def _generate(engine: Steppable, prompt: Sequence[int], new_tokens: int) -> list[int]:
    number = engine.add(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    token_ids: list[int] = []
    while True:
        for output in engine.step():
            if output.request_id == number:
                token_ids.extend(output.token_ids)
                if output.completion is not None:
                    return token_ids
