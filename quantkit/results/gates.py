"""Gates such as `recovery>=98.9`: the metrics that they limit, verdicts and remedies.

A gate compares the model's value of a metric with a limit. A limit with a plus sign, such as `loop_rate<=+0.01`, is
compared with the model's value minus the original's. If the 95 % interval of the value includes the limit, the
explanation says that more samples are needed. A gate fails if its metric was not measured.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import GateError, suggestion
from quantkit.quantities import counted, interval
from quantkit.results import BenchmarkRun, Comparison, GateResult, Report
from quantkit.results.behaviour import DECISIONS, MIN_PROMPTS, MarginRecord
from quantkit.results.remedies import ACCEPTANCE_RATIO, remedy
from quantkit.results.statistics.comparison import ACCEPTANCE, ANSWER_LENGTH, BEHAVIOUR
from quantkit.results.statistics.summary import median
from quantkit.safety.untrusted import shorten

Values = dict[str, float]  # keyed by subject; a gate without a subject usually limits the first value
Read = Callable[[Report], Mapping[str, float | None]]

TEXT, LENGTH, RATE, DRAFTS = "perplexity: ", f"{ANSWER_LENGTH}: ", f"{BEHAVIOUR}: ", f"{ACCEPTANCE}: "
RATIO = "a ratio (1 if both models are equal)"
SHARE = "a share between 0 and 1"
PER_CENT = "in per cent of the original (about 100)"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that gates can limit.

    Args:
        kind: topic of the metric: "accuracy", "decoding", "behaviour", "speed" or "memory".
        read: function that returns a report's values, keyed by subject (e.g. a task); a gate without a subject usually
            limits the first value. A value of None was not measured.
        low, high: range of plausible limits; a limit outside this range probably has the wrong unit.
        unit: unit of the limit, for the message about an implausible limit.
        over: like `read`, but returns differences from the original, for limits with a plus sign; None = the metric
            does not support such limits.
        subjects: all possible subjects; empty = any.
        lacks: function that returns the reason why a report has no value for a subject; None = the only possible reason
            is that nothing was measured.
    """

    kind: str
    read: Read
    low: float = 0.0
    high: float = float("inf")
    unit: str = RATIO
    over: Read | None = None
    subjects: tuple[str, ...] = ()
    lacks: Callable[[Report, str | None], str] | None = None

    def values(self, report: Report, *, over: bool = False) -> Values:
        """Return the measured values, keyed by subject; with `over`, their differences from the original's values."""
        read = self.over if over and self.over else self.read
        return {subject: value for subject, value in read(report).items() if value is not None}


def gate_numbers(report: Report) -> dict[str, float]:
    """Return every measured number that gates can limit, keyed as in gates: `metric` or `metric[subject]`."""
    numbers: dict[str, float] = {}
    for name, metric in METRICS.items():
        values = metric.values(report)
        if values:
            numbers[name] = next(iter(values.values()))
        numbers |= {f"{name}[{subject}]": value for subject, value in values.items() if subject}
    return numbers


def _of_comparisons(read: Callable[[Comparison], float | None], prefix: str = "") -> Read:
    """Return a function that reads the values of comparisons whose subject begins with `prefix`, keyed by the rest of
    the subject.

    Without a prefix, it reads the values of tasks.
    """

    def numbers(report: Report) -> dict[str, float | None]:
        others = () if prefix else (TEXT, LENGTH, RATE, DRAFTS)
        chosen = [c for c in report.comparisons if c.subject.startswith(prefix) and not c.subject.startswith(others)]
        return {c.subject.removeprefix(prefix): read(c) for c in chosen}

    return numbers


def _ratio(comparison: Comparison) -> float | None:
    return _quotient(comparison.value, comparison.baseline)


def _fidelity(name: str) -> Read:
    return lambda report: {"": getattr(report.fidelity, name, None)}


def _margins(read: Callable[[MarginRecord], float | None]) -> Read:
    """Return a function that reads a value from the margins of each kind of decision, if enough prompts have such
    decisions; the values are keyed by kind.
    """

    def numbers(report: Report) -> dict[str, float | None]:
        known = report.behaviour.margins if report.behaviour else ()
        return {each.kind: read(each) for each in known if each.num_prompts >= MIN_PROMPTS}

    return numbers


def _flips(report: Report) -> dict[str, float | None]:
    """Return the share of flipped decisions: for each kind with enough prompts, and for all kinds together (key "")."""
    behaviour = report.behaviour
    enough = behaviour is not None and sum(each.num_prompts for each in behaviour.margins) >= MIN_PROMPTS
    return {"": behaviour.flips if behaviour and enough else None, **_margins(lambda each: each.flips)(report)}


def _too_few(report: Report, kind: str | None) -> str:
    """Return why a report has no value for a kind of decision, or for all kinds (None): the original makes such
    decisions in too few prompts. Return "" if the report has no behaviour test.
    """
    if report.behaviour is None:
        return ""
    counts = {each.kind: each.num_prompts for each in report.behaviour.margins}
    count, what = (sum(counts.values()), "makes decisions") if kind is None else (counts.get(kind, 0), DECISIONS[kind])
    return f"the original {what} in {counted(count, 'prompt')}, fewer than the {MIN_PROMPTS} needed"


def _run_ratios(read: Callable[[BenchmarkRun], float | None]) -> Read:
    """Return a function that divides, for each workload, the value of the model's run by that of the original's run.

    Args:
        read: function that returns the value of a run.
    """

    def ratios(report: Report) -> dict[str, float | None]:
        return {run.workload.name: _quotient(read(run), read(other)) for run, other in report.paired_runs if other}

    return ratios


def _latency_ratios(name: str) -> Read:
    """Return a function that reads, for each workload, the ratio of the model's median latency to the original's."""
    return _run_ratios(lambda run: median(run.latencies[name]))


def _quotient(value: float | None, baseline: float | None) -> float | None:
    return value / baseline if value is not None and baseline else None


def _memory_ratio(report: Report) -> dict[str, float | None]:
    """Return the model's weight bytes in memory divided by the original's; bytes on disk if memory was not observed."""
    ours = report.benchmark and report.benchmark.memory_part("weights")
    theirs = report.baseline_benchmark and report.baseline_benchmark.memory_part("weights")
    if ours and theirs and ours.observed_bytes and theirs.observed_bytes:
        return {"": ours.observed_bytes / theirs.observed_bytes}
    return _size_ratio(report)


def _size_ratio(report: Report) -> dict[str, float | None]:
    original = report.baseline_model
    return {"": _quotient(report.model.num_bytes, original.num_bytes if original else None)}


METRICS = {  # without a subject, the first value counts, or the worst if the metric is in `WORST_COUNTS`
    # The bounds reveal a limit in the wrong unit: recovery>=0.97 is not in per cent, perplexity_ratio<=105 is no ratio.
    "recovery": Metric("accuracy", _of_comparisons(lambda c: c.recovery), 10, 200, PER_CENT),
    "score": Metric("accuracy", _of_comparisons(lambda c: c.value), unit="a score"),
    "perplexity": Metric("accuracy", _of_comparisons(lambda c: c.value, TEXT), low=1, unit="at least 1"),
    "perplexity_ratio": Metric("accuracy", _of_comparisons(_ratio, TEXT), high=10),
    "length_ratio": Metric("accuracy", _of_comparisons(_ratio, LENGTH), high=10),
    "kl": Metric("accuracy", _fidelity("mean_kl"), unit="in nats"),
    "kl_p99": Metric("accuracy", _fidelity("p99_kl"), unit="in nats"),
    "top1": Metric("accuracy", _fidelity("top1_agreement"), high=1, unit=SHARE),
    "drift": Metric(
        "accuracy",
        lambda report: {"": report.drift.slope if report.drift else None},
        -1,
        unit="in nats per 1,000 tokens",
    ),
    "margin": Metric("behaviour", _margins(lambda m: m.ratio), high=10, subjects=tuple(DECISIONS), lacks=_too_few),
    "flips": Metric("behaviour", _flips, high=1, unit=SHARE, subjects=tuple(DECISIONS), lacks=_too_few),
    **{
        name: Metric(
            *("behaviour", _of_comparisons(lambda c: c.value, RATE + name)),
            high=1,
            unit=SHARE,
            over=_of_comparisons(lambda c: c.difference, RATE + name),
        )
        for name in ("loop_rate", "unended", "empty", "other_script")
    },
    **{
        name: Metric("behaviour", _of_comparisons(lambda c: c.recovery, RATE + name), 10, 200, PER_CENT)
        for name in ("right_format", "valid_calls")
    },
    "ttft_ratio": Metric("speed", _latency_ratios("TTFT"), high=100),
    "itl_ratio": Metric("speed", _latency_ratios("ITL"), high=100),
    "tpot_ratio": Metric("speed", _latency_ratios("TPOT"), high=100),
    "throughput_ratio": Metric("speed", _run_ratios(lambda run: run.output_tokens_per_s), high=1000),
    ACCEPTANCE_RATIO: Metric("speed", _of_comparisons(_ratio, DRAFTS), high=10),
    "memory_ratio": Metric("memory", _memory_ratio, high=10),
    "size_ratio": Metric("memory", _size_ratio, high=10),
    "bits_per_weight": Metric("memory", lambda report: {"": report.model.bits_per_weight}, high=32, unit="in bits"),
}
IN_PER_CENT = ("recovery", "right_format", "valid_calls")
WORST_COUNTS = ("perplexity", "perplexity_ratio", "length_ratio", "margin")
MORE_PROMPTS = "test more prompts: give --suite standard, or your own file as --prompts"
CLEAR_NATS, LEAST_MARGIN, MOST_LOOPS = 1.0, 0.7, 0.1  # limits in `behaviour_gates`


OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
PATTERN = re.compile(r"\s*([a-z0-9_]+)\s*(?:\[\s*([^\]]+?)\s*\])?\s*(>=|<=|>|<)\s*([-+.\d][-+.\deE]*)\s*(%?)\s*")
_MAX_LENGTH = 200
EXAMPLES = "recovery>=98.9, perplexity_ratio<=1.05, kl<=0.02, recovery[demo_facts]>=97"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate: `metric[subject] operator limit`; with `over`, the limit has a plus sign and limits a difference."""

    text: str
    metric: str
    subject: str | None
    operator: str
    limit: float
    over: bool = False


def parse_gate(text: str) -> Gate:
    """Parse one gate.

    Args:
        text: text of the gate, e.g. `recovery>=98.9`.
    Raises:
        GateError: the text is not a gate, the metric is unknown, or the limit seems to have the wrong unit.
    """
    if len(text) > _MAX_LENGTH:  # matching n spaces takes time n^3
        raise GateError(f"gate {shorten(text)} has {len(text)} characters; the maximum is {_MAX_LENGTH}")
    match = PATTERN.fullmatch(text)
    if match is None:
        raise GateError(f"gate {text!r} is not valid; write a metric, a comparison and a limit, e.g. {EXAMPLES}")
    name, subject, sign, written, percent = match.groups()
    if name not in METRICS:
        raise GateError(
            f"gate {text!r}: unknown metric {name!r}{suggestion(name, METRICS)}; supported: {', '.join(METRICS)}"
        )
    try:
        limit = float(written)
    except ValueError:
        raise GateError(f"gate {text!r}: the limit {written!r} is not a number; write e.g. 0.02 or 98.9") from None
    # `top1>=98%` means the share 0.98; recovery is in per cent already.
    limit /= 100 if percent and name not in IN_PER_CENT else 1
    metric = METRICS[name]
    if not metric.low <= limit <= metric.high:
        raise GateError(
            f"gate {text!r}: {name} is {metric.unit}, so the limit {limit:g} is probably in the wrong unit; change it"
        )
    if subject and metric.subjects and subject not in metric.subjects:
        known = f"{suggestion(subject, metric.subjects)}; supported: {', '.join(metric.subjects)}"
        raise GateError(f"gate {text!r}: unknown decision {subject!r}{known}")
    over = metric.over is not None and written.startswith("+")
    # Built from the parsed parts, so that equal gates have equal texts.
    plain = f"{name}[{subject}]" if subject else name
    text = f"{plain}{sign}{limit:+g}" if over else f"{plain}{sign}{limit:g}"
    return Gate(text=text, metric=name, subject=subject, operator=sign, limit=limit, over=over)


def behaviour_gates(report: Report) -> list[str]:
    """Return behaviour gates that suit any recipe: one on the loop rate, and one on each kind of decision that the
    original makes often and by a clear margin.
    """
    if report.behaviour is None:
        return []
    clear = [m.kind for m in report.behaviour.margins if m.num_prompts >= MIN_PROMPTS and m.baseline >= CLEAR_NATS]
    loops = [f"loop_rate<=+{MOST_LOOPS}"] if METRICS["loop_rate"].values(report) else []
    return [f"margin[{kind}]>={LEAST_MARGIN}" for kind in clear] + loops


def evaluate_gates(report: Report, gates: Sequence[Gate | str]) -> list[GateResult]:
    """Check each gate against the numbers of a report, and return the results in the order of the gates.

    Args:
        report: the report.
        gates: parsed gates, or their texts.
    Raises:
        GateError: a gate is not valid, or its subject (a task, text or workload) is not in the report.
    """
    return [_judge(report, gate if isinstance(gate, Gate) else parse_gate(gate)) for gate in gates]


def _judge(report: Report, gate: Gate) -> GateResult:
    metric = METRICS[gate.metric]
    values = metric.values(report, over=gate.over)
    has_value = gate.subject in values if gate.subject is not None else bool(values)
    reason = metric.lacks(report, gate.subject) if metric.lacks and not has_value else ""
    value = None if reason else _pick(gate, values)
    held = value is not None and OPERATORS[gate.operator](value, gate.limit)
    todo = MORE_PROMPTS if reason else remedy(report, gate.metric, metric.kind, measured=value is not None)
    if value is None:
        explanation = f"{reason or f'{gate.metric} was not measured'}, so the gate does not hold"
    else:
        over = " over the original's" if gate.over else ""
        limit = f"{gate.limit:+g}" if gate.over else f"{gate.limit:g}"
        explanation = f"{gate.metric} is {value:.4g}{over}, must be {gate.operator} {limit}"
        explanation += _doubt(report, gate, values)
    return GateResult(
        gate=gate.text,
        metric=gate.metric,
        subject=gate.subject,
        limit=gate.limit,
        value=value,
        held=held,
        explanation=explanation,
        remedy=None if held else todo,
    )


def _pick(gate: Gate, values: Values) -> float | None:
    """Return the value that a gate limits: the value of its subject. Without a subject, return the worst value if the
    metric is in `WORST_COUNTS`, and otherwise the first.
    """
    if gate.subject is not None:
        # If nothing was measured, the gate fails. If only this subject is missing, the user misspelt it.
        if values and gate.subject not in values:
            raise GateError(
                f"gate {gate.text!r}: the report has no {gate.metric} for {gate.subject!r}"
                f"{suggestion(gate.subject, values)}; "
                f"it has {', '.join(name or gate.metric + ' without brackets' for name in values)}"
            )
        return values.get(gate.subject)
    if not values:
        return None
    if gate.metric in WORST_COUNTS:
        # The worst value is the one nearest to breaking the gate: the smallest if the limit is a lower bound.
        return (min if gate.operator.startswith(">") else max)(values.values())
    return next(iter(values.values()))


def _doubt(report: Report, gate: Gate, values: Values) -> str:
    """Return a warning if the interval of the gate's value includes the limit; otherwise an empty text."""
    low, high = _gate_interval(report, gate, values)
    if low is None or high is None or not low <= gate.limit <= high:
        return ""
    between = interval(low, high, 1 if gate.limit >= 10 else 3)
    items = "tokens" if gate.metric == "drift" else "samples"
    return f"; its 95 % interval, {between}, includes the limit: use more {items} to decide"


def _gate_interval(report: Report, gate: Gate, values: Values) -> tuple[float | None, float | None]:
    """Return the interval of the gate's value, in the gate's unit; (None, None) for metrics without an interval."""
    if gate.metric == "drift" and report.drift is not None:
        return report.drift.slope_low, report.drift.slope_high
    if gate.metric == "margin" and report.behaviour is not None:
        # Without a subject, the gate judged the worst kind of decision.
        kind = gate.subject or min(values, key=lambda each: values[each])
        return next((each.low, each.high) for each in report.behaviour.margins if each.kind == kind)
    rate = METRICS[gate.metric].kind == "behaviour"
    subject = RATE + gate.metric if rate else gate.subject or next(iter(values), "")
    comparison = report.find_comparison(subject) if rate or gate.metric == "recovery" else None
    if comparison is None:
        return None, None
    if gate.over:
        return comparison.low, comparison.high
    recovery = gate.metric in IN_PER_CENT
    return (comparison.recovery_low, comparison.recovery_high) if recovery else (None, None)
