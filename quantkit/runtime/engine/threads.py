"""Choice of the number of threads: measured, or as the user asks.

Decoding is bound by memory bandwidth, which one or two threads may saturate. On a shared machine, every further thread
can delay each barrier. So a short measurement tries several thread counts on typical products. An evaluation only
scores prompts, so the measurement for it uses only a large product.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from quantkit.errors import InputError
from quantkit.machine.devices import MAX_THREADS
from quantkit.machine.system import after_fork, available_cores

# A number of threads is good enough if its time is within this factor of the best; other cores stay free for others.
_GOOD_ENOUGH = 1.10
_BUDGET_S = 0.08
_MIN_REPEATS, _MAX_REPEATS = 3, 15
# 48 MB of weights, more than most caches; and a product that is bound by arithmetic.
_GEMV_ROWS, _GEMV_WIDTH = 12288, 1024
_GEMM_TOKENS, _GEMM_ROWS = 32, 1024
_PROMPT_TOKENS = 512  # for an evaluation: a product as long as in its steps, where barriers cost little
_has_pool = True  # whether OpenMP's pool has threads; it has none in a forked child


class ThreadChoice(NamedTuple):
    """A number of threads, and the reason for it in one line for `--stats`."""

    threads: int
    reason: str


def choose_threads(requested: int | None = None, *, decodes: bool = True) -> ThreadChoice:
    """Choose a number of threads without changing torch's setting.

    Args:
        requested: number to use; None = measure, for at most about 0.15 s, or 0.4 s without decoding.
        decodes: whether single tokens are decoded; False = only prompts are computed.
    Raises:
        InputError: the requested number is below 1 or above `MAX_THREADS`.
    """
    if requested is not None:
        if requested < 1:
            raise InputError(
                f"threads is {requested}; give a positive number, or leave threads out to measure the best number"
            )
        if requested > MAX_THREADS:
            raise InputError(f"threads is {requested}, above the limit of {MAX_THREADS} on this machine; give fewer")
        return ThreadChoice(requested if _has_pool else 1, "as requested")
    limit = thread_limit()
    if limit == 1:
        return ThreadChoice(1, "only one is allowed")
    before = torch.get_num_threads()
    try:
        timings = measure_threads(thread_counts(limit), decodes)
    finally:
        torch.set_num_threads(before)
    return smallest_near_best(timings)


@functools.cache
def guard_forks() -> None:
    """Make forked children compute with one thread, because they inherit OpenMP's pool without its threads."""
    after_fork(_forget_pool)


def _forget_pool() -> None:
    global _has_pool
    _has_pool = False
    torch.set_num_threads(1)


def thread_limit() -> int:
    """Return how many threads this process may keep busy.

    This is the minimum of the CPU affinity, the cgroup quota and OMP_NUM_THREADS; in a forked child it is 1.
    """
    if not _has_pool:
        return 1
    limits = [available_cores()]
    # The variable may list a number for each level of nesting; the first number is for the outermost level.
    openmp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if openmp.isdigit():
        limits.append(int(openmp))
    return max(1, min(limits))


def thread_counts(limit: int) -> tuple[int, ...]:
    """Return the numbers of threads to try: the powers of two up to the limit, and the limit itself."""
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]
    return tuple(sorted({*powers, limit}))


def measure_threads(counts: tuple[int, ...], decodes: bool = True) -> dict[int, tuple[float, ...]]:
    """Return the median seconds of each matrix product, keyed by number of threads; changes torch's setting.

    For decoding there are two products: one token through a large weight, which is bound by memory, and several tokens
    through a small weight, which is bound by arithmetic. Otherwise there is one product of many tokens.
    """
    # Filled, not zeros: untouched zeros all lie on one page.
    weight = torch.ones(_GEMV_ROWS, _GEMV_WIDTH)
    sizes = ((1, _GEMV_ROWS), (_GEMM_TOKENS, _GEMM_ROWS)) if decodes else ((_PROMPT_TOKENS, _GEMM_ROWS),)
    products = [partial(functional.linear, torch.ones(tokens, _GEMV_WIDTH), weight[:rows]) for tokens, rows in sizes]
    timings: dict[int, tuple[float, ...]] = {}
    for count in counts:
        torch.set_num_threads(count)
        timings[count] = tuple(_median_time(product, _BUDGET_S / len(counts) / len(sizes)) for product in products)
    return timings


def _median_time(work: Callable[[], object], budget_s: float) -> float:
    """Return the median seconds of a few calls after one warm-up call.

    The minimum would mislead: next to busy processes, threads often wait for each other, and the best case hides that.
    """
    work()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < _MIN_REPEATS or (time.perf_counter() < end and len(times) < _MAX_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def smallest_near_best(timings: dict[int, tuple[float, ...]]) -> ThreadChoice:
    """Return the smallest number of threads whose time is within 10 % of the best time; all products count equally.

    Args:
        timings: seconds of each product, keyed by number of threads in ascending order from one.
    """
    costs = {
        count: sum(own / alone for own, alone in zip(times, timings[1], strict=True))
        for count, times in timings.items()
    }
    best = min(costs.values())
    threads = next(count for count, cost in costs.items() if cost <= _GOOD_ENOUGH * best)
    tried = ", ".join(f"{count}: {costs[1] / cost:.2f}x" for count, cost in costs.items())
    return ThreadChoice(threads, f"measured speed per number of threads: {tried}")
