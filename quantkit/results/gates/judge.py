"""Judging gates on a report.

A gate is judged on the number itself, not on its interval; when the interval includes the limit the explanation says
that more samples are needed to be sure. What was not measured does not hold.
"""

from collections.abc import Sequence

from quantkit.errors import GateError, suggestion
from quantkit.quantities import interval
from quantkit.results import GateResult, Report
from quantkit.results.gates.language import OPERATORS, Gate, parse_gate
from quantkit.results.gates.metrics import METRICS, WORST_COUNTS, Values
from quantkit.results.gates.remedies import remedy


def evaluate_gates(report: Report, gates: Sequence[Gate | str]) -> list[GateResult]:
    """Judge each gate on a report, in order.

    Args:
        report: what was measured.
        gates: read or as text.
    Raises:
        GateError: a gate that cannot be read, or one about a task or workload that the report does not have while it
            has others.
    """
    return [_judge(report, gate if isinstance(gate, Gate) else parse_gate(gate)) for gate in gates]


def _judge(report: Report, gate: Gate) -> GateResult:
    values = METRICS[gate.metric].values(report)
    value = _pick(gate, values)
    held = value is not None and OPERATORS[gate.operator](value, gate.limit)
    if value is None:
        explanation = f"{gate.metric} was not measured, so the gate does not hold"
    else:
        explanation = f"{gate.metric} is {value:.4g}, asked for {gate.operator} {gate.limit:g}"
        explanation += _doubt(report, gate, values)
    return GateResult(
        gate=gate.text,
        metric=gate.metric,
        subject=gate.subject,
        limit=gate.limit,
        value=value,
        held=held,
        explanation=explanation,
        remedy=None if held else remedy(report, gate, measured=value is not None),
    )


def _pick(gate: Gate, values: Values) -> float | None:
    """The gate's number; without a subject the first one, or the worst of answer lengths and texts."""
    if gate.subject is not None:
        # A number that was not measured at all fails the gate; a subject missing among others is a typing error.
        if values and gate.subject not in values:
            raise GateError(
                f"gate {gate.text!r}: no {gate.metric} of {gate.subject!r}{suggestion(gate.subject, values)}; "
                f"the report has {', '.join(name for name in values if name)}"
            )
        return values.get(gate.subject)
    if not values:
        return None
    if gate.metric in WORST_COUNTS:
        # The worst is whatever comes nearest to breaking the gate: the least one where the limit is a lower one.
        return (min if gate.operator.startswith(">") else max)(values.values())
    return next(iter(values.values()))


def _doubt(report: Report, gate: Gate, values: Values) -> str:
    """That the interval includes the limit, if it does."""
    subject = gate.subject or next(iter(values), "")
    # Only recovery has its interval in the units of its gate.
    comparison = report.find_comparison(subject) if gate.metric == "recovery" else None
    if comparison is None or comparison.recovery_low is None or comparison.recovery_high is None:
        return ""
    if comparison.recovery_low <= gate.limit <= comparison.recovery_high:
        return (
            f"; its 95 % interval, {interval(comparison.recovery_low, comparison.recovery_high)}, includes the limit: "
            "more samples would tell"
        )
    return ""
