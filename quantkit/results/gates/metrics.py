"""The numbers that gates can be about, and where in a report they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.results import BenchmarkRun, Comparison, Report
from quantkit.results.statistics import ALL_TASKS, ANSWER_LENGTH, median_interval

Values = dict[str, float]  # by subject; the first is meant when a gate names none


RATIO = "a ratio, 1 when equal to the original"
SHARE = "a share between 0 and 1"
PER_CENT = "in per cent of the original, about 100"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that gates can be about.

    Args:
        meaning: one line, for help and reports.
        kind: what a failed gate is about: "accuracy", "speed" or "memory".
        read: the numbers of a report by subject, the default first; empty when not measured.
        low, high: the plausible limits; outside them the unit was probably mistaken.
        unit: of the limit, for that message.
    """

    meaning: str
    kind: str
    read: Callable[[Report], Values]
    low: float = 0.0
    high: float = float("inf")
    unit: str = RATIO


def gate_numbers(report: Report) -> dict[str, float]:
    """Every number that gates can be about, by the name a gate would use; what was not measured is absent."""
    numbers = {}
    for name, metric in METRICS.items():
        for position, (subject, value) in enumerate(metric.read(report).items()):
            if position == 0:
                numbers[name] = value
            if subject:
                numbers[f"{name}[{subject}]"] = value
    return numbers


def _of_comparisons(
    read: Callable[[Comparison], float | None], wanted: Callable[[str], bool], prefix: str = ""
) -> Callable[[Report], Values]:
    """Numbers of the comparisons whose subject is wanted, by subject."""

    def values(report: Report) -> Values:
        read_values = ((c.subject.removeprefix(prefix), read(c)) for c in report.comparisons if wanted(c.subject))
        return {subject: value for subject, value in read_values if value is not None}

    return values


TEXT, LENGTH = "perplexity: ", f"{ANSWER_LENGTH}: "


def _is_task(subject: str) -> bool:
    return not subject.startswith((TEXT, LENGTH))


def _of_texts(read: Callable[[Comparison], float | None]) -> Callable[[Report], Values]:
    return _of_comparisons(read, lambda subject: subject.startswith(TEXT), TEXT)


def _ratio(comparison: Comparison) -> float | None:
    return comparison.value / comparison.baseline if comparison.baseline else None


def _fidelity(name: str) -> Callable[[Report], Values]:
    return lambda report: {} if report.fidelity is None else {"": getattr(report.fidelity, name)}


def _run_ratios(read: Callable[[BenchmarkRun], float | None]) -> Callable[[Report], Values]:
    """A number of the model's runs over that of the original's, by workload."""

    def values(report: Report) -> Values:
        ratios = {}
        for run in report.benchmark.runs if report.benchmark else ():
            other = report.baseline_benchmark and report.baseline_benchmark.find_run(run.workload.name)
            value, baseline = read(run), read(other) if other else None
            if value is not None and baseline:
                ratios[run.workload.name] = value / baseline
        return ratios

    return values


def _latency_ratios(name: str) -> Callable[[Report], Values]:
    """Median of the model over median of the original."""

    def median(run: BenchmarkRun) -> float | None:
        values = getattr(run, name)
        return median_interval(values)[0] if values else None

    return _run_ratios(median)


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


METRICS = {
    "recovery": Metric(
        f"score as per cent of the original's, [{ALL_TASKS}] or one task",
        *("accuracy", _of_comparisons(lambda c: c.recovery, _is_task), 10, 200, PER_CENT),
    ),
    "score": Metric("the score itself", "accuracy", _of_comparisons(lambda c: c.value, _is_task), unit="a score"),
    "perplexity": Metric(
        "perplexity itself, worst text", "accuracy", _of_texts(lambda c: c.value), low=1, unit="at least 1"
    ),
    "perplexity_ratio": Metric("perplexity over the original's, worst text", "accuracy", _of_texts(_ratio), high=10),
    "length_ratio": Metric(
        "length of generated answers over the original's, worst task",
        *("accuracy", _of_comparisons(_ratio, lambda subject: subject.startswith(LENGTH), LENGTH), 0, 10),
    ),
    "kl": Metric(
        "mean KL divergence of next-token distributions, nats", "accuracy", _fidelity("mean_kl"), unit="in nats"
    ),
    "kl_p99": Metric("its 99th percentile", "accuracy", _fidelity("p99_kl"), unit="in nats"),
    "top1": Metric(
        "share of positions with the same likeliest token", "accuracy", _fidelity("top1_agreement"), high=1, unit=SHARE
    ),
    "ttft_ratio": Metric(
        "median time to first token over the original's, first workload", "speed", _latency_ratios("ttft_s"), high=100
    ),
    "itl_ratio": Metric(
        "median inter-token latency over the original's, first workload",
        *("speed", _latency_ratios("inter_token_s"), 0, 100),
    ),
    "tpot_ratio": Metric(
        "median time per output token over the original's, first workload",
        *("speed", _latency_ratios("tpot_s"), 0, 100),
    ),
    "throughput_ratio": Metric(
        "output tokens per second over the original's, first workload",
        *("speed", _run_ratios(lambda run: run.output_tokens_per_s), 0, 1000),
    ),
    "memory_ratio": Metric("bytes of weights in memory over the original's", "memory", _memory_ratio, high=10),
    "size_ratio": Metric("tensor bytes on disk over the original's", "memory", _size_ratio, high=10),
    "bits_per_weight": Metric("of the quantized linears, scales included", "memory", _bits, high=32, unit="in bits"),
}
IN_PER_CENT = ("recovery",)
WORST_COUNTS = ("perplexity", "perplexity_ratio", "length_ratio")
