"""Suggest what to change when a gate fails, based on the other results in the report."""

from quantkit.results import Report, SensitivityProposal

ACCEPTANCE_RATIO = "acceptance_ratio"
_TO_MEASURE = {
    ACCEPTANCE_RATIO: "add `--speculate mtp` to `quantkit verify`, for a model with an MTP head",
    "drift": "add `--drift TOKENS` to `quantkit verify`, e.g. 2k",
}
_MEASURE_IT = (
    "run `quantkit verify` so that it measures this metric (`--suite none` skips tasks, `--no-bench` skips speed and "
    "memory), or choose other gates with --gate"
)
_TO_IMPROVE = {
    ACCEPTANCE_RATIO: "leave the MTP head unquantized, or give it 8 bits",
    "drift": "give more bits to the KV cache (`--kv-cache`, or `kv_cache:` in the recipe) or to the weights",
}


def remedy(report: Report, metric: str, kind: str, *, measured: bool = True) -> str:
    """Return the change that is most likely to make a gate hold, in one line.

    Args:
        report: the report; its sensitivity map and diagnosis are used if present.
        metric: the metric of the gate that failed.
        kind: topic of this metric; see `gates.Metric`.
        measured: whether the metric was measured.
    """
    if not measured:
        return _TO_MEASURE.get(metric, _MEASURE_IT)
    if metric in _TO_IMPROVE:
        return _TO_IMPROVE[metric]
    if kind == "speed":
        return _speed_remedy(report)
    if kind == "memory":
        return "use fewer bits (`--set weights.dtype=int4`) or larger groups, or quantize the head and ignored linears"
    return _accuracy_remedy(report)


def _accuracy_remedy(report: Report) -> str:
    # Best evidence first: a proposal, the sensitivity map, and last the errors of single linears.
    sensitivity = report.sensitivity
    if sensitivity is not None and sensitivity.proposal is not None:
        return describe_proposal(sensitivity.proposal)
    if sensitivity is not None and sensitivity.records:
        names = ", ".join(f"layer {r.layer} {r.group}" for r in sensitivity.worst(3))
        return f"the most sensitive parts are {names}: give them more bits, or use 8 bits everywhere"
    if report.compression is not None and report.compression.layers:
        names = ", ".join(name for name, _ in report.compression.worst_linears(3))
        return f"the largest errors are in {names}: ignore these linears, or use smaller groups or more bits"
    return (
        "train the scales with `quantkit distill`, or use smaller groups (`--set weights.group_size=32`), a calibrated "
        "recipe such as awq-int4, or 8 bits"
    )


def describe_proposal(proposal: SensitivityProposal, most: int = 6) -> str:
    """Describe a proposal in one line that names at most `most` fused groups.

    If these are all groups, the line also gives the `--set` options to paste.
    """
    groups = ", ".join(f"layer {layer} {group}" for layer, group in proposal.groups[:most])
    options = " ".join(f"--set '{override}'" for override in proposal.overrides)
    if len(proposal.groups) > most:
        groups += f" and {len(proposal.groups) - most} more groups"
        options = options and "--set OVERRIDE, where OVERRIDE is sensitivity.proposal.overrides in report.json"
    cost = f", {proposal.extra_bytes / 2**20:.1f} MiB more" if proposal.extra_bytes else ""
    verb = "ignore" if proposal.action == "ignore" else "give more bits to"
    text = f"{verb} {groups} (predicted KL {proposal.predicted_kl:.3g}{cost})"
    return text + (options and f": quantkit quantize ... {options}")


def _speed_remedy(report: Report) -> str:
    findings = report.diagnosis.findings if report.diagnosis is not None else ()
    advice = next((f for f in findings if f.advice), None)
    if advice is not None:
        gain = f", expected: {advice.expected_gain}" if advice.expected_gain else ""
        return f"{advice.statement.rstrip('.')}: {advice.advice.rstrip('.')}{gain}"
    return (
        "for one user at a time, use fewer weight bits and a quantized head; for many users, use a quantized KV cache "
        "or 8-bit weights and activations"
    )
