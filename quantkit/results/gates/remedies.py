"""What to do about a gate that did not hold, from the sensitivity map, the diagnosis, or experience."""

from quantkit.results import Report, SensitivityProposal
from quantkit.results.gates.language import Gate
from quantkit.results.gates.metrics import METRICS


def remedy(report: Report, gate: Gate, *, measured: bool = True) -> str:
    """The nearest thing to change, one line.

    Args:
        report: what was measured; its sensitivity map and diagnosis are used where they are there.
        gate: that did not hold.
        measured: whether there was a number at all.
    """
    if not measured:
        return "run `quantkit verify` with the original as --baseline and with what this gate needs switched on"
    kind = METRICS[gate.metric].kind
    if kind == "speed":
        return _speed_remedy(report)
    if kind == "memory":
        return "fewer bits (`--set weights.dtype=int4`), larger groups, or quantize what is ignored, the head too"
    return _accuracy_remedy(report)


def _accuracy_remedy(report: Report) -> str:
    # A proposal has been measured, the map ranks by output, and errors of single linears say least about it.
    sensitivity = report.sensitivity
    if sensitivity is not None and sensitivity.proposal is not None:
        return describe_proposal(sensitivity.proposal)
    if sensitivity is not None and sensitivity.records:
        names = ", ".join(f"layer {r.layer} {r.group}" for r in sensitivity.worst(3))
        return f"the most sensitive parts are {names}: ignore them or give them more bits"
    if report.compression is not None and report.compression.layers:
        names = ", ".join(name for name, _ in report.compression.worst_linears(3))
        return f"the largest errors are in {names}: ignore these, or use smaller groups or more bits"
    return "use smaller groups (`--set weights.group_size=32`), a calibrated recipe such as awq-int4, or 8 bits"


def describe_proposal(proposal: SensitivityProposal) -> str:
    """A proposal as one line, with the override to paste."""
    groups = ", ".join(f"layer {layer} {group}" for layer, group in proposal.groups)
    verb = "ignore" if proposal.action == "ignore" else "give more bits to"
    options = " ".join(f"--set '{override}'" for override in proposal.overrides)
    cost = f", {proposal.extra_bytes / 2**20:.1f} MiB more" if proposal.extra_bytes else ""
    text = f"{verb} {groups} (predicted KL {proposal.predicted_kl:.3g}{cost})"
    return f"{text}: quantkit quantize ... {options}" if options else text


def _speed_remedy(report: Report) -> str:
    findings = report.diagnosis.findings if report.diagnosis is not None else ()
    advice = next((f for f in findings if f.advice), None)
    if advice is not None:
        gain = f", expected: {advice.expected_gain}" if advice.expected_gain else ""
        return f"{advice.statement.rstrip('.')}: {advice.advice.rstrip('.')}{gain}"
    return "for one user at a time fewer weight bits and a quantized head help, for many a quantized KV cache or 8 bits"
