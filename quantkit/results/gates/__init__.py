"""Gates: promises about a checkpoint such as `recovery>=98.9`, read and judged on a report. Torch-free."""

from quantkit.results.gates.judge import evaluate_gates
from quantkit.results.gates.language import Gate, parse_gate, parse_gates
from quantkit.results.gates.metrics import METRICS, Metric, gate_numbers
from quantkit.results.gates.remedies import describe_proposal, remedy

__all__ = [
    "METRICS",
    "Gate",
    "Metric",
    "describe_proposal",
    "evaluate_gates",
    "gate_numbers",
    "parse_gate",
    "parse_gates",
    "remedy",
]
