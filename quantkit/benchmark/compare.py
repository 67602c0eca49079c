"""Two models in turns: A B B A A B B A ..., so that what drifts (clocks, neighbours, heat) meets both alike.

A ratio is median over median; its noise is what the rounds say: how far the medians of one model's own rounds lie
apart. A difference counts as one when every round shows it and it exceeds that noise.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.workload import Load, make_load, request_key
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, RequestTiming, Workload
from quantkit.results.statistics.summary import median

Verdict = Literal["faster", "slower", "noise"]
_RATE = "tokens/s"


def measure_rounds(
    options: BenchmarkOptions,
    names: Sequence[str],
    run: Callable[[int, Load], BenchmarkRun],
    *,
    vocab_size: int,
    avoid: Iterable[int] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[list[BenchmarkRun]]:
    """Send the same requests to one model, or to several in turns, whatever computes them.

    Args:
        options: what to measure; its rounds are rounds of all.
        names: of the models, for people.
        run: sends a load to the model of this number.
        vocab_size: prompts hold tokens from 0 to here that all models know.
        avoid: and none of these.
        progress: called with what is going on.
    Returns:
        for each model its run of every workload, rounds joined.
    """
    workloads = options.workloads()
    rounds: dict[tuple[int, str], list[BenchmarkRun]] = {}
    # Workloads take turns where they are compared: the same requests, continuously and in static batches.
    twins: dict[str, list[Workload]] = {}
    for workload in workloads:
        twins.setdefault(request_key(workload), []).append(workload)
    for group in twins.values():
        entries = [(who, workload) for workload in group for who in range(len(names))]
        for turn in turns(options.rounds, len(entries)):
            who, workload = entries[turn]
            done = rounds.setdefault((who, workload.name), [])
            progress(f"{workload.name}: {names[who]}, round {len(done) + 1} of {options.rounds}")
            load = make_load(workload, vocab_size, avoid=avoid, spread=options.spread, turn=len(done))
            done.append(run(who, load))
    return [[join_rounds(rounds[who, workload.name]) for workload in workloads] for who in range(len(names))]


def turns(num_rounds: int, count: int = 2) -> list[int]:
    """Order in which two sides are measured, 0 the first and 1 the second; three rounds are A B, B A, A B."""
    order = list(range(count))
    return [who for number in range(num_rounds) for who in (order if number % 2 == 0 else order[::-1])]


def join_rounds(rounds: Sequence[BenchmarkRun]) -> BenchmarkRun:
    """Repetitions of one workload as one run, on a clock that stands still while the other model has its turn."""
    requests: list[RequestTiming] = []
    end = 0.0
    for number, run in enumerate(rounds):
        start = min(timing.arrived_s for timing in run.requests)
        shift = end - start if number else 0.0
        requests.extend(_shifted(timing, shift) for timing in run.requests)
        end = max(timing.token_s[-1] for timing in requests)
    return BenchmarkRun(workload=rounds[0].workload, requests=tuple(requests), rounds=len(rounds))


def split_rounds(run: BenchmarkRun) -> list[BenchmarkRun]:
    """Inverse of `join_rounds`, up to the clock."""
    size = len(run.requests) // run.rounds
    return [
        BenchmarkRun(workload=run.workload, requests=run.requests[start : start + size])
        for start in range(0, size * run.rounds, size)
    ]


def _shifted(timing: RequestTiming, seconds: float) -> RequestTiming:
    return dataclasses.replace(
        timing,
        arrived_s=timing.arrived_s + seconds,
        token_s=tuple(token + seconds for token in timing.token_s),
        finished_s=None if timing.finished_s is None else timing.finished_s + seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One number of the model over the other's.

    Args:
        workload: name of the run.
        metric: "TTFT", "ITL", "TPOT" or "tokens/s".
        value, baseline: medians over all rounds, of the model and of the other; seconds, or tokens per second.
        low, high: smallest and largest ratio of a round.
        noise: half the spread of one model's own rounds, as a share of its median; the larger of the two.
        verdict: about speed, so a smaller ITL is faster; "noise": no difference above it.
    """

    workload: str
    metric: str
    value: float
    baseline: float
    low: float
    high: float
    noise: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """Value over baseline."""
        return self.value / self.baseline


def _speeds(run: BenchmarkRun) -> dict[str, float | None]:
    """Figures by which runs are compared: medians of latencies, and the one number of which more is faster."""
    return {**{name: median(values) for name, values in run.latencies.items()}, _RATE: run.output_tokens_per_s}


def compare_runs(run: BenchmarkRun, baseline: BenchmarkRun) -> list[Ratio]:
    """Every metric that both have.

    Args:
        run, baseline: the same workload, as many rounds each.
    """
    ours, theirs, ratios = _speeds(run), _speeds(baseline), []
    rounds = [list(map(_speeds, split_rounds(side))) for side in (run, baseline)]
    for metric, value in ours.items():
        other = theirs[metric]
        pairs = [(a[metric] or 0.0, b[metric] or 0.0) for a, b in zip(*rounds, strict=True)]
        # A round without the metric, such as TPOT of single tokens, has no ratio.
        pairs = [pair for pair in pairs if all(pair)]
        if not (value and other and pairs):
            continue
        rates = [a / b for a, b in pairs]
        noise = max(map(_spread, zip(*pairs, strict=True)))
        is_above = min(rates) > 1
        verdict: Verdict = "noise"
        if (is_above or max(rates) < 1) and abs(value / other - 1) > noise:
            verdict = "faster" if is_above == (metric == _RATE) else "slower"
        ratios.append(
            Ratio(
                workload=run.workload.name,
                metric=metric,
                value=value,
                baseline=other,
                low=min(rates),
                high=max(rates),
                noise=noise,
                verdict=verdict,
            )
        )
    return ratios


def compare_results(result: BenchmarkResult, baseline: BenchmarkResult) -> list[Ratio]:
    """All runs that both have, but for the one that only serves the fits."""
    ratios = []
    for run in result.runs:
        other = baseline.find_run(run.workload.name)
        if other is not None and run.workload.name != SWEEP_NAME and run.rounds == other.rounds:
            ratios.extend(compare_runs(run, other))
    return ratios


def _spread(values: Sequence[float]) -> float:
    """Half of largest minus smallest, as a share of the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)
