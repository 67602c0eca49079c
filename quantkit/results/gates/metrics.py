"""The numbers that gates can be about, and where in a report they stand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantkit.results import BenchmarkRun, Comparison, Report
from quantkit.results.statistics.comparison import ANSWER_LENGTH
from quantkit.results.statistics.summary import median

Values = dict[str, float]  # by subject; the first is meant when a gate names none
Read = Callable[[Report], Mapping[str, float | None]]

TEXT, LENGTH = "perplexity: ", f"{ANSWER_LENGTH}: "
RATIO = "a ratio, 1 when equal to the original"
SHARE = "a share between 0 and 1"
PER_CENT = "in per cent of the original, about 100"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that gates can be about.

    Args:
        kind: what a failed gate is about: "accuracy", "speed" or "memory".
        read: the numbers of a report by subject, the default first; None or absent when not measured.
        low, high: the plausible limits; outside them the unit was probably mistaken.
        unit: of the limit, for that message.
    """

    kind: str
    read: Read
    low: float = 0.0
    high: float = float("inf")
    unit: str = RATIO

    def values(self, report: Report) -> Values:
        """What was measured, by subject."""
        return {subject: value for subject, value in self.read(report).items() if value is not None}


def gate_numbers(report: Report) -> dict[str, float]:
    """Every number that gates can be about, by the name a gate would use; what was not measured is absent."""
    numbers = {}
    for name, metric in METRICS.items():
        for position, (subject, value) in enumerate(metric.values(report).items()):
            if position == 0:
                numbers[name] = value
            if subject:
                numbers[f"{name}[{subject}]"] = value
    return numbers


def _of_comparisons(read: Callable[[Comparison], float | None], prefix: str = "") -> Read:
    """Numbers of the comparisons whose subject begins so, by the rest of it; without a prefix those of tasks."""

    def numbers(report: Report) -> dict[str, float | None]:
        others = () if prefix else (TEXT, LENGTH)
        chosen = [c for c in report.comparisons if c.subject.startswith(prefix) and not c.subject.startswith(others)]
        return {c.subject.removeprefix(prefix): read(c) for c in chosen}

    return numbers


def _ratio(comparison: Comparison) -> float | None:
    return _quotient(comparison.value, comparison.baseline)


def _fidelity(name: str) -> Read:
    return lambda report: {"": getattr(report.fidelity, name, None)}


def _run_ratios(read: Callable[[BenchmarkRun], float | None]) -> Read:
    """A number of the model's runs over that of the original's, by workload."""

    def ratios(report: Report) -> dict[str, float | None]:
        return {run.workload.name: _quotient(read(run), read(other)) for run, other in report.paired_runs if other}

    return ratios


def _latency_ratios(name: str) -> Read:
    """Median of the model over median of the original."""
    return _run_ratios(lambda run: median(run.latencies[name]))


def _quotient(value: float | None, baseline: float | None) -> float | None:
    return value / baseline if value is not None and baseline else None


def _memory_ratio(report: Report) -> dict[str, float | None]:
    """Weights in memory; where they were not observed, tensor bytes on disk."""
    ours = report.benchmark and report.benchmark.memory_part("weights")
    theirs = report.baseline_benchmark and report.baseline_benchmark.memory_part("weights")
    if ours and theirs and ours.observed_bytes and theirs.observed_bytes:
        return {"": ours.observed_bytes / theirs.observed_bytes}
    return _size_ratio(report)


def _size_ratio(report: Report) -> dict[str, float | None]:
    original = report.baseline_model
    return {"": _quotient(report.model.num_bytes, original.num_bytes if original else None)}


METRICS = {  # of texts and tasks the worst counts, of workloads the first, unless a subject is given
    # Limits notice a wrong unit: recovery>=0.97 is a share where per cent is meant, perplexity_ratio<=105 the reverse.
    "recovery": Metric("accuracy", _of_comparisons(lambda c: c.recovery), 10, 200, PER_CENT),
    "score": Metric("accuracy", _of_comparisons(lambda c: c.value), unit="a score"),
    "perplexity": Metric("accuracy", _of_comparisons(lambda c: c.value, TEXT), low=1, unit="at least 1"),
    "perplexity_ratio": Metric("accuracy", _of_comparisons(_ratio, TEXT), high=10),
    "length_ratio": Metric("accuracy", _of_comparisons(_ratio, LENGTH), high=10),
    "kl": Metric("accuracy", _fidelity("mean_kl"), unit="in nats"),
    "kl_p99": Metric("accuracy", _fidelity("p99_kl"), unit="in nats"),
    "top1": Metric("accuracy", _fidelity("top1_agreement"), high=1, unit=SHARE),
    "ttft_ratio": Metric("speed", _latency_ratios("TTFT"), high=100),
    "itl_ratio": Metric("speed", _latency_ratios("ITL"), high=100),
    "tpot_ratio": Metric("speed", _latency_ratios("TPOT"), high=100),
    "throughput_ratio": Metric("speed", _run_ratios(lambda run: run.output_tokens_per_s), high=1000),
    "memory_ratio": Metric("memory", _memory_ratio, high=10),
    "size_ratio": Metric("memory", _size_ratio, high=10),
    "bits_per_weight": Metric("memory", lambda report: {"": report.model.bits_per_weight}, high=32, unit="in bits"),
}
IN_PER_CENT = ("recovery",)
WORST_COUNTS = ("perplexity", "perplexity_ratio", "length_ratio")
