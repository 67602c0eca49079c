"""Compare the speed of two models in alternating rounds A B, B A, A B, ...

Drift of the machine (clocks, load, heat) then affects both models equally.
A ratio divides the two models' medians over all rounds. Its noise is half the spread between the rounds of a single
model, relative to their median; the larger of the two models' values counts. A difference counts only if every round
has it in the same direction and it exceeds the noise.
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
    """Send the same requests to one model, or to several in alternating rounds.

    Args:
        options: what to measure.
        names: model names for reports.
        run: function that sends a load to the model with the given index, and returns the run.
        vocab_size: number of tokens that all models know; prompts are drawn from these.
        avoid: tokens that prompts must not contain.
        progress: called with a description of the current work.
    Returns:
        For each model, one run per workload, which joins all rounds.
    """
    workloads = options.workloads()
    rounds: dict[tuple[int, str], list[BenchmarkRun]] = {}
    # A closed loop and its static batches have the same requests. They take turns, because they are compared.
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
    """Return the order in which several models run, as indices. Three rounds of two models are A B, B A, A B."""
    order = list(range(count))
    return [who for number in range(num_rounds) for who in (order if number % 2 == 0 else order[::-1])]


def join_rounds(rounds: Sequence[BenchmarkRun]) -> BenchmarkRun:
    """Join the rounds of one workload into one run, on a clock that pauses while other models run."""
    requests: list[RequestTiming] = []
    end = 0.0
    for number, run in enumerate(rounds):
        start = min(timing.arrived_s for timing in run.requests)
        shift = end - start if number else 0.0
        requests.extend(_shifted(timing, shift) for timing in run.requests)
        end = max(timing.token_s[-1] for timing in requests)
    return BenchmarkRun(workload=rounds[0].workload, requests=tuple(requests), rounds=len(rounds))


def split_rounds(run: BenchmarkRun) -> list[BenchmarkRun]:
    """Split a run into its rounds; the inverse of `join_rounds` except for the clock."""
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
    """One figure of the model relative to the baseline.

    Args:
        workload: name of the run.
        metric: "TTFT", "ITL", "TPOT" or "tokens/s".
        value, baseline: medians over all rounds of the model and of the baseline; seconds, or tokens per second.
        low, high: smallest and largest ratio of a single round.
        noise: half the spread between the rounds of one model, relative to their median; the larger of the two models'
            values.
        verdict: "faster", "slower", or "noise" if the difference does not exceed the noise or the rounds disagree about
            its direction. Smaller latencies and more tokens/s count as faster.
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
    """Return the figures by which runs are compared: median latencies, and the throughput."""
    return {**{name: median(values) for name, values in run.latencies.items()}, _RATE: run.output_tokens_per_s}


def compare_runs(run: BenchmarkRun, baseline: BenchmarkRun) -> list[Ratio]:
    """Compare every latency and the throughput that both runs have.

    Args:
        run, baseline: runs of the same workload with the same number of rounds.
    """
    ours, theirs, ratios = _speeds(run), _speeds(baseline), []
    rounds = [list(map(_speeds, split_rounds(side))) for side in (run, baseline)]
    for metric, value in ours.items():
        other = theirs[metric]
        pairs = [(a[metric] or 0.0, b[metric] or 0.0) for a, b in zip(*rounds, strict=True)]
        # A round without the metric has no ratio; TPOT, for example, does not exist if each answer has one token.
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
    """Compare all workloads that both results measured in the same number of rounds, except the length sweep."""
    ratios = []
    for run in result.runs:
        other = baseline.find_run(run.workload.name)
        if other is not None and run.workload.name != SWEEP_NAME and run.rounds == other.rounds:
            ratios.extend(compare_runs(run, other))
    return ratios


def _spread(values: Sequence[float]) -> float:
    """Return half the difference of the largest and the smallest value, as a share of the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)
