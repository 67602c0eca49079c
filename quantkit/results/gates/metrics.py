"""The numbers that gates can be about, and where in a report they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.results import BenchmarkResult, Comparison, Report
from quantkit.results.statistics import ALL_TASKS, ANSWER_LENGTH, median_interval

Values = dict[str, float]  # by subject; the first is meant when a gate names none


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A number that gates can be about.

    Args:
        name: as written in a gate.
        meaning: one line, for help and reports.
        kind: what a failed gate is about: "accuracy", "speed" or "memory".
        read: the numbers of a report by subject, the default first; empty when not measured.
        low, high: the plausible limits; outside them the unit was probably mistaken.
        unit: of the limit, for that message.
    """

    name: str
    meaning: str
    kind: str
    read: Callable[[Report], Values]
    low: float = 0.0
    high: float = float("inf")
    unit: str = "a ratio, 1 when equal to the original"


def gate_numbers(report: Report) -> dict[str, float]:
    """Every number that gates can be about, by the name a gate would use; what was not measured is absent."""
    found = {}
    for name, metric in METRICS.items():
        for position, (subject, value) in enumerate(metric.read(report).items()):
            if position == 0:
                found[name] = value
            if subject:
                found[f"{name}[{subject}]"] = value
    return found


def _comparison_values(
    read: Callable[[Comparison], float | None], wanted: Callable[[Comparison], bool], prefix: str = ""
) -> Callable[[Report], Values]:
    """Numbers of the comparisons that are wanted, by subject."""

    def values(report: Report) -> Values:
        found = ((c.subject.removeprefix(prefix), read(c)) for c in report.comparisons if wanted(c))
        return {subject: value for subject, value in found if value is not None}

    return values


def _is_task(comparison: Comparison) -> bool:
    return not (_is_text(comparison) or _is_length(comparison))


def _is_text(comparison: Comparison) -> bool:
    return comparison.subject.startswith("perplexity: ")


def _is_length(comparison: Comparison) -> bool:
    return comparison.subject.startswith(f"{ANSWER_LENGTH}: ")


def _ratio(comparison: Comparison) -> float | None:
    return comparison.value / comparison.baseline if comparison.baseline else None


def _fidelity(read: str) -> Callable[[Report], Values]:
    return lambda report: {} if report.fidelity is None else {"": getattr(report.fidelity, read)}


def _latency_ratios(name: str) -> Callable[[Report], Values]:
    """Median of the model over median of the original, by workload."""

    def median(benchmark: BenchmarkResult, workload: str) -> float | None:
        run = benchmark.find_run(workload)
        values = () if run is None else getattr(run, name)
        return median_interval(values)[0] if values else None

    return lambda report: _by_workload(report, median)


def _throughput_ratios(report: Report) -> Values:
    def rate(benchmark: BenchmarkResult, workload: str) -> float | None:
        run = benchmark.find_run(workload)
        return None if run is None else run.output_tokens_per_s

    return _by_workload(report, rate)


def _by_workload(report: Report, read: Callable[[BenchmarkResult, str], float | None]) -> Values:
    ours, theirs = report.benchmark, report.baseline_benchmark
    if ours is None or theirs is None:
        return {}
    found = {}
    for run in ours.runs:
        value, baseline = read(ours, run.workload.name), read(theirs, run.workload.name)
        if value is not None and baseline:
            found[run.workload.name] = value / baseline
    return found


def _memory_ratio(report: Report) -> Values:
    """Weights in memory; where they were not observed, tensor bytes on disk."""
    ours = report.benchmark and report.benchmark.memory_part("weights")
    theirs = report.baseline_benchmark and report.baseline_benchmark.memory_part("weights")
    if ours and theirs and ours.observed_bytes and theirs.observed_bytes:
        return {"": ours.observed_bytes / theirs.observed_bytes}
    return _size_ratio(report)


def _size_ratio(report: Report) -> Values:
    baseline = report.baseline_model
    return {"": report.model.num_bytes / baseline.num_bytes} if baseline is not None and baseline.num_bytes else {}


def _bits(report: Report) -> Values:
    bits = report.model.bits_per_weight
    return {} if bits is None else {"": bits}


SHARE = "a share between 0 and 1"
PER_CENT = "in per cent of the original, about 100"
_ALL = (
    Metric(
        name="recovery",
        meaning=f"score as per cent of the original's, [{ALL_TASKS}] or one task",
        kind="accuracy",
        read=_comparison_values(lambda c: c.recovery, _is_task),
        low=10,
        high=200,
        unit=PER_CENT,
    ),
    Metric(
        name="score",
        meaning="the score itself",
        kind="accuracy",
        read=_comparison_values(lambda c: c.value, _is_task),
        unit="a score",
    ),
    Metric(
        name="perplexity",
        meaning="perplexity itself, worst text",
        kind="accuracy",
        read=_comparison_values(lambda c: c.value, _is_text, "perplexity: "),
        low=1,
        unit="at least 1",
    ),
    Metric(
        name="perplexity_ratio",
        meaning="perplexity over the original's, worst text",
        kind="accuracy",
        read=_comparison_values(_ratio, _is_text, "perplexity: "),
        high=10,
    ),
    Metric(
        name="length_ratio",
        meaning="length of generated answers over the original's, worst task",
        kind="accuracy",
        read=_comparison_values(_ratio, _is_length, f"{ANSWER_LENGTH}: "),
        high=10,
    ),
    Metric(
        name="kl",
        meaning="mean KL divergence of next-token distributions, nats",
        kind="accuracy",
        read=_fidelity("mean_kl"),
        unit="in nats",
    ),
    Metric(name="kl_p99", meaning="its 99th percentile", kind="accuracy", read=_fidelity("p99_kl"), unit="in nats"),
    Metric(
        name="top1",
        meaning="share of positions with the same likeliest token",
        kind="accuracy",
        read=_fidelity("top1_agreement"),
        high=1,
        unit=SHARE,
    ),
    Metric(
        name="ttft_ratio",
        meaning="median time to first token over the original's, first workload",
        kind="speed",
        read=_latency_ratios("ttft_s"),
        high=100,
    ),
    Metric(
        name="itl_ratio",
        meaning="median inter-token latency over the original's, first workload",
        kind="speed",
        read=_latency_ratios("inter_token_s"),
        high=100,
    ),
    Metric(
        name="tpot_ratio",
        meaning="median time per output token over the original's, first workload",
        kind="speed",
        read=_latency_ratios("tpot_s"),
        high=100,
    ),
    Metric(
        name="throughput_ratio",
        meaning="output tokens per second over the original's, first workload",
        kind="speed",
        read=_throughput_ratios,
        high=1000,
    ),
    Metric(
        name="memory_ratio",
        meaning="bytes of weights in memory over the original's",
        kind="memory",
        read=_memory_ratio,
        high=10,
    ),
    Metric(
        name="size_ratio",
        meaning="tensor bytes on disk over the original's",
        kind="memory",
        read=_size_ratio,
        high=10,
    ),
    Metric(
        name="bits_per_weight",
        meaning="of the quantized linears, scales included",
        kind="memory",
        read=_bits,
        high=32,
        unit="in bits",
    ),
)
METRICS = {metric.name: metric for metric in _ALL}
IN_PER_CENT = ("recovery",)
WORST_COUNTS = ("perplexity", "perplexity_ratio", "length_ratio")
