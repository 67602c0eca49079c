"""The part of a diagnosis that is about serving: stalls, queues, and limits that requests miss."""

import statistics
from collections.abc import Iterator

from quantkit.quantities import as_percent, duration, times
from quantkit.results import BenchmarkRun, Finding
from quantkit.results.statistics.summary import percentile

_BUSY = 0.5  # p75 - p25 over p50 of ITL
_STALL = 3.0  # p99 over p50 of ITL
_QUEUE = 2.0  # TTFT under load over TTFT alone


def busy(run: BenchmarkRun) -> Iterator[Finding]:
    """Gaps of a request that had the engine to itself differ where nothing of ours differs."""
    gaps = run.inter_token_s
    if run.workload.concurrency != 1 or len(gaps) < 20:
        return
    low, middle, high = (percentile(gaps, at) for at in (25, 50, 75))
    if middle <= 0 or high - low < _BUSY * middle:
        return
    yield Finding(
        statement=f"The machine was busy: the middle half of the gaps of {run.workload.name} differ by "
        f"{as_percent((high - low) / middle)}, and shares of its limits are as uncertain.",
        evidence=f"ITL p25 {duration(low)}, p50 {duration(middle)}, p75 {duration(high)}, {len(gaps)} gaps",
        advice="Measure again when nothing else runs.",
    )


def stalls(run: BenchmarkRun) -> Iterator[Finding]:
    """The tail of ITL lies far above its median."""
    gaps = run.inter_token_s
    # Below, the 99th percentile lies between the two largest gaps: a single stall decides.
    if len(gaps) < 100:
        return
    middle, tail = percentile(gaps, 50), percentile(gaps, 99)
    if middle <= 0 or tail < _STALL * middle:
        return
    alone = run.workload.concurrency == 1
    yield Finding(
        statement=f"Streaming stalls in {run.workload.name}: one gap in a hundred is {times(tail / middle)} the usual.",
        evidence=f"ITL p50 {duration(middle)}, p99 {duration(tail)}, {len(gaps)} gaps",
        advice="Nothing else ran in the engine: look for other work on this machine."
        if alone
        else "Prompts of newcomers are computed between tokens: a smaller token budget makes the pieces smaller.",
    )


def queue(run: BenchmarkRun, alone: BenchmarkRun) -> Iterator[Finding]:
    """Requests that arrive by chance wait for those before them."""
    if run.workload.rate_per_s is None or run is alone:
        return
    here, single = statistics.median(run.ttft_s), statistics.median(alone.ttft_s)
    if here < _QUEUE * single:
        return
    done = run.requests_per_s or 0.0
    yield Finding(
        statement=f"Requests queue at {run.workload.rate_per_s:g} per second: TTFT is {times(here / single)} that of a "
        "request alone.",
        evidence=f"median TTFT {duration(here)} against {duration(single)}; {done:.2g} requests/s answered",
        advice=f"Offer less than {done:.2g} requests per second, or add a machine.",
    )


def goodput(run: BenchmarkRun) -> Iterator[Finding]:
    """Requests miss the limits, and which."""
    met, answered = run.goodput_per_s, run.requests_per_s
    if met is None or not answered or met >= 0.995 * answered:
        return
    limits = {"TTFT": run.workload.ttft_limit_s, "TPOT": run.workload.tpot_limit_s}
    missed = [
        f"{name} above {duration(limit)} in {count} of {len(run.latencies[name])} requests"
        for name, limit in limits.items()
        if limit is not None and (count := sum(value > limit for value in run.latencies[name]))
    ]
    yield Finding(
        statement=f"Only {as_percent(met / answered)} of the requests of {run.workload.name} keep the limits.",
        evidence="; ".join(missed),
        advice="Lower the concurrency or rate until goodput stops growing.",
    )
