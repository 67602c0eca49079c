"""From gates that failed to what a repair has to reach, in the one number that a sensitivity map is made of: KL.

Losses of accuracy and the logarithm of a perplexity ratio are taken to shrink in proportion to KL. That is a first
guess, and a careful one: accuracy is lost the faster the more KL there is.
"""

import math

from quantkit.evaluate.sensitivity import Goal
from quantkit.results import GateResult, Report
from quantkit.results.gates import METRICS


def failed_accuracy(report: Report) -> list[GateResult]:
    """Gates about accuracy that were measured and did not hold."""
    return [
        gate
        for gate in report.gates
        if not gate.held and gate.value is not None and METRICS[gate.metric].kind == "accuracy"
    ]


def repair_goal(report: Report) -> Goal | None:
    """What a repaired model has to reach; None when there is nothing to repair or no way to tell.

    Args:
        report: with fidelity and judged gates.
    """
    failed = failed_accuracy(report)
    if not failed or report.fidelity is None:
        return None
    total = report.fidelity.mean_kl
    limits = {gate.metric: gate.limit for gate in failed}
    shares = [share for gate in failed if (share := _share(report, gate)) is not None]
    kl = min([limits.get("kl", math.inf), *(total * share for share in shares)])
    goal = Goal(kl=kl, kl_p99=limits.get("kl_p99", math.inf), top1=limits.get("top1", 0.0))
    return None if goal == Goal() else goal


def _share(report: Report, gate: GateResult) -> float | None:
    """How much of the loss may remain; None for gates that say nothing of it."""
    assert gate.value is not None
    if gate.metric == "recovery":
        return _ratio(100 - gate.limit, 100 - gate.value)
    if gate.metric == "perplexity_ratio":
        # The logarithm of a perplexity ratio is a loss in nats per token, the unit of KL.
        return _ratio(_log(gate.limit), _log(gate.value))
    of_text = gate.metric == "perplexity"
    # A gate may name no subject; the value that it was judged on tells which comparison was meant.
    alike = (c for c in report.comparisons if c.value == gate.value and c.metric.startswith("perplexity") == of_text)
    comparison = next(alike, None)
    if comparison is None:
        return None
    if gate.metric == "score":
        return _ratio(comparison.baseline - gate.limit, comparison.baseline - gate.value)
    if gate.metric == "perplexity":
        return _ratio(_log(gate.limit / comparison.baseline), _log(gate.value / comparison.baseline))
    return None


def _ratio(allowed: float, lost: float) -> float | None:
    """A share between 0 and 1; None when nothing was lost or more was lost than can be said."""
    if not lost > 0 or math.isinf(lost):
        return None
    return max(0.0, min(1.0, allowed / lost))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
