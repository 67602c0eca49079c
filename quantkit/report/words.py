"""Numbers and verdicts in words, the same in HTML, Markdown and on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantkit.results import Comparison, GateResult, Report

VERDICTS = {
    "better": "better than the original, beyond noise and chance",
    "worse": "worse than the original, beyond noise and chance",
    "no difference seen": "no difference seen: what there is may be chance",
    "noise": "noise: no more than the original changes under other arithmetic",
}
MISSING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, thousands separated; a dash for what is missing."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A number that already is in per cent."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f} %"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign, rounded to so many places after the point."""
    return MISSING if value is None or math.isnan(value) else f"{value:+.{digits}f}"


def p_value(value: float | None) -> str:
    """A p value, never a bare zero."""
    if value is None:
        return MISSING
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def byte_size(value: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def duration(seconds: float | None) -> str:
    """A latency in milliseconds, or seconds from one second on."""
    if seconds is None:
        return MISSING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """`98.7 to 100.9`; a dash when unknown."""
    if low is None or high is None:
        return MISSING
    return f"{low:.{digits}f} to {high:.{digits}f}"


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
    if num_tasks < 5:
        return ""
    return (
        f"With {num_tasks} rows tested at 5 %, about {number(num_tasks / 20, 2)} would look different by chance alone "
        "were nothing different; the mean over tasks is one test."
    )
