"""Verdicts in words, the same in HTML, Markdown and on the terminal."""

from collections.abc import Sequence

from quantkit.quantities import MISSING, interval, number, percent
from quantkit.results import Comparison, GateResult, Report

VERDICTS = {
    "better": "better than the original, beyond noise and chance",
    "worse": "worse than the original, beyond noise and chance",
    "no difference seen": "no difference seen: what there is may be chance",
    "noise": "noise: no more than the original changes under other arithmetic",
}


def p_value(value: float | None) -> str:
    """A p value, never a bare zero."""
    if value is None:
        return MISSING
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def recovery_text(comparison: Comparison | None) -> str:
    """`99.8 % (98.7 to 100.9)`."""
    if comparison is None or comparison.recovery is None:
        return MISSING
    text = percent(comparison.recovery)
    if comparison.recovery_low is None:
        return text
    return f"{text} ({interval(comparison.recovery_low, comparison.recovery_high)})"


def headline(report: Report) -> str:
    """The verdict in one sentence."""
    failed = [gate for gate in report.gates if not gate.held]
    count = len(report.gates)
    if not report.gates:
        return "No gates were set, so nothing was promised and nothing is refused."
    if not failed:
        return "The gate holds." if count == 1 else f"All {count} gates hold."
    names = ", ".join(gate.gate for gate in failed)
    return f"{len(failed)} of {count} gate{'s' if count > 1 else ''} did not hold: {names}."


def gate_lines(gates: Sequence[GateResult]) -> list[str]:
    """`held: kl<=0.02 (kl is 0.013, ...)` for each gate, then each remedy once."""
    lines = [f"{'held' if gate.held else 'failed'}: {gate.gate} ({gate.explanation})" for gate in gates]
    return [*lines, *(f"to do: {text}" for text in remedies(gates))]


def remedies(gates: Sequence[GateResult]) -> list[str]:
    """What to do about the gates that failed, each said once."""
    return list(dict.fromkeys(gate.remedy for gate in gates if gate.remedy))


def chance_note(num_tasks: int) -> str:
    """A reminder for tables of many tests; empty for few."""
    # With fewer rows less than a quarter of a false alarm is expected, which needs no note.
    if num_tasks < 5:
        return ""
    return (
        f"With {num_tasks} rows tested at 5 %, about {number(num_tasks / 20, 2)} would look different by chance alone "
        "were nothing different; the mean over tasks is one test."
    )
