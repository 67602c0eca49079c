"""Measure the gain of a KV cache: generate a text with the cache, and by recomputing the whole context for each token.

Recomputing uses the same engine, kernels and chunks: each token is a separate request whose prompt is all text before
it. So the cache is the only difference. Prefix caching must be off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quantkit.results import RequestTiming
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import Completion, SamplingParams

_MARKS = (1, 10, 30, 100, 300, 1000, 3000, 10_000)


class Mark(NamedTuple):
    """Seconds until this many tokens were generated, with and without the cache, and the ratio of both times."""

    new_tokens: int
    cached_s: float
    recomputed_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheComparison:
    """Timings of the same text generated with and without the cache.

    Args:
        cached, recomputed: timestamps of the tokens.
        num_same: number of leading new tokens that are equal in both texts. Later tokens may differ after a tie,
            because batches round differently.
    """

    cached: RequestTiming
    recomputed: RequestTiming
    num_same: int

    def marks(self) -> list[Mark]:
        """Times at 1, 10, 30, 100, 300, ... tokens and at the end."""
        count = self.cached.num_new_tokens
        numbers = [*(mark for mark in _MARKS if mark < count), count]
        ways = ([way.token_s[n - 1] - way.arrived_s for n in numbers] for way in (self.cached, self.recomputed))
        return [Mark(n, cached, slow, slow / cached) for n, cached, slow in zip(numbers, *ways, strict=True)]


def compare_cache(
    llm: LLM, prompt: Sequence[int], new_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> CacheComparison:
    """Generate greedily with and without the cache.

    Args:
        llm: an idle model with its prefix cache off.
        prompt: token ids.
        new_tokens: number of tokens to generate.
        progress: called with the number of tokens recomputed so far.
    """
    generate_by_recomputing(llm, prompt, 2)  # warm-up
    _generate(llm, prompt, 2)
    cached = _generate(llm, prompt, new_tokens)
    ids, recomputed = generate_by_recomputing(llm, prompt, new_tokens, progress)
    same = next((i for i, (a, b) in enumerate(zip(ids, cached.token_ids, strict=True)) if a != b), new_tokens)
    return CacheComparison(cached=cached.timing, recomputed=recomputed, num_same=same)


def generate_by_recomputing(
    llm: LLM, prompt: Sequence[int], new_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[int], RequestTiming]:
    """Return greedy tokens, each from a prefill of everything before it, and their timestamps."""
    ids, timings = list(prompt), list[RequestTiming]()
    for _ in range(new_tokens):
        completion = _generate(llm, ids, 1)
        ids.extend(completion.token_ids)
        timings.append(completion.timing)
        progress(len(timings))
    times = tuple(timing.token_s[0] for timing in timings)
    return ids[len(prompt) :], replace(timings[0], token_s=times, finished_s=times[-1])


def _generate(llm: LLM, prompt: Sequence[int], new_tokens: int) -> Completion:
    return llm.generate(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))[0]
