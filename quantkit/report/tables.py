"""Tables and verdicts of a report about evaluation and compression, for HTML, Markdown and the terminal."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quantkit.quantities import MISSING, byte_size, counted, duration, interval, number, percent, signed
from quantkit.report.table import Column, Table, facts
from quantkit.results import (
    CheckpointSummary,
    Comparison,
    CompressionResult,
    DriftResult,
    EngineReading,
    FidelityResult,
    GateResult,
    Report,
    SensitivityMap,
)
from quantkit.results.compression import describe_caches, describe_experts
from quantkit.results.statistics.comparison import ACCEPTANCE, ALL_TASKS, ANSWER_LENGTH, BEHAVIOUR, LENGTH_BAND
from quantkit.results.statistics.summary import median

VERDICTS = {
    "better": "better than the original, beyond noise and chance",
    "worse": "worse than the original, beyond noise and chance",
    "no difference seen": "no difference seen: any difference may be chance",
    "unknown": "unknown: too little data to test whether the difference is chance",
    "noise": "noise: not larger than the original's change in another dtype",
}


def p_value(value: float | None) -> str:
    """Format a p value; values below 0.001 as `<0.001`."""
    if value is None:
        return MISSING
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def recovery_text(comparison: Comparison | None) -> str:
    """Format recovery with its interval: `99.8 % (98.7 to 100.9)`."""
    if comparison is None or comparison.recovery is None:
        return MISSING
    text = percent(comparison.recovery)
    if comparison.recovery_low is None:
        return text
    return f"{text} ({interval(comparison.recovery_low, comparison.recovery_high)})"


def headline(report: Report) -> str:
    """Return one sentence that says whether the gates of a report hold."""
    failed = [gate for gate in report.gates if not gate.held]
    count = len(report.gates)
    if not report.gates:
        return "No gates were set, so no quality threshold was checked."
    if not failed:
        return "The gate holds." if count == 1 else f"All {count} gates hold."
    names = ", ".join(gate.gate for gate in failed)
    return f"{len(failed)} of {counted(count, 'gate')} did not hold: {names}."


def gate_lines(gates: Sequence[GateResult]) -> list[str]:
    """Return a line such as `held: kl<=0.02 (kl is 0.013, ...)` for each gate, then each remedy once."""
    lines = [f"{'held' if gate.held else 'failed'}: {gate.gate} ({gate.explanation})" for gate in gates]
    return [*lines, *(f"to do: {text}" for text in remedies(gates))]


def remedies(gates: Sequence[GateResult]) -> list[str]:
    """Return the remedies of the gates that failed, each once."""
    return list(dict.fromkeys(gate.remedy for gate in gates if gate.remedy))


def chance_note(num_tasks: int) -> str:
    """Return a note on multiple testing for a table; empty if the table has fewer than 5 tests."""
    # With fewer rows, less than a quarter of a false alarm is expected, so no note is needed.
    if num_tasks < 5:
        return ""
    return (
        f"{num_tasks} rows are tested at 5 %, so about {number(num_tasks / 20, 2)} would look different by chance "
        "alone if nothing had changed; the mean over tasks is a single test."
    )


def module_table(summary: CheckpointSummary) -> Table:
    """Create the table of a checkpoint's kinds of modules and their storage."""
    numbers = Column("count", str), Column("parameters", "{:,}".format), Column("size", byte_size)
    rows = tuple((m.kind, m.stored_as, m.count, m.num_parameters, m.num_bytes) for m in summary.modules)
    return Table(columns=(Column("module"), Column("stored as"), *numbers), rows=rows)


NOTE = "These are predictions from the sources of these releases; they were not tested on GPUs."


def engine_table(title: str, readings: Sequence[EngineReading]) -> Table | None:
    """Create the table that says how each engine reads a checkpoint, and why; None without readings.

    Args:
        title: heading of the first column.
        readings: predictions for the engines.
    """
    if not readings:
        return None
    return Table(
        columns=(Column(title), Column("reads"), Column("by, or why not")),
        rows=tuple(
            (
                f"{reading.engine} {reading.release}",
                reading.reads,
                "; ".join(filter(None, (reading.reason, reading.cache))),
            )
            for reading in readings
        ),
        note=NOTE,
    )


four_digits = partial(number, digits=4)


def key_figures(report: Report) -> list[tuple[str, str, str]]:
    """Return the most important figures: (name, figure, explanation)."""
    figures = []
    model, original = report.model, report.baseline_model
    if original is not None and original.num_bytes and model.num_bytes:
        share = percent(100 * model.num_bytes / original.num_bytes, 0)
        figures.append(("Size", share, f"{byte_size(model.num_bytes)} of {byte_size(original.num_bytes)} on disk"))
    tasks = report.find_comparison(ALL_TASKS)
    if tasks is not None:
        beside = f"95 % interval {interval(tasks.recovery_low, tasks.recovery_high)}: {tasks.verdict}"
        figures.append(("Recovery", percent(tasks.recovery), beside))
    text = next((c for c in report.comparisons if c.subject.startswith("perplexity")), None)
    if text is not None:
        beside = f"{number(text.baseline)} before, {number(text.value)} now: {text.verdict}"
        # The number may come from a file and be zero.
        figure = f"{number(text.value / text.baseline, 4)}x" if text.baseline else number(None)
        figures.append(("Perplexity", figure, beside))
    for run, other in report.paired_runs[:1]:
        ours, theirs = median(run.inter_token_s), median(other.inter_token_s) if other else None
        if ours is not None:
            figure = duration(ours) if theirs is None else f"{number(ours / theirs)}x"
            before = "" if theirs is None else f"{duration(theirs)} before, {duration(ours)} now, "
            figures.append(("Time between tokens", figure, f"{before}{run.workload.name}"))
    return figures


def comparison_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Create the table of tasks and texts: both values, the difference with its interval, recovery and verdict."""
    rows = [c for c in comparisons if not c.subject.startswith((ANSWER_LENGTH, BEHAVIOUR))]
    if not rows:
        return None
    tasks = [c for c in rows if not c.subject.startswith(("perplexity", ACCEPTANCE)) and c.subject != ALL_TASKS]
    return Table(
        title="Model beside original, same items",
        columns=(
            *(Column(), Column("original", four_digits), Column("model", four_digits)),
            *(
                Column("difference (95 % interval)", _difference, detail=True),
                Column("recovery (95 % interval)", recovery_text),
            ),
            *(Column("p", p_value, detail=True), Column("noise", lambda floor: f"±{number(floor, 2)}", detail=True)),
            *(Column("n", "{:,}".format, detail=True), Column("verdict")),
        ),
        rows=tuple(
            (c.subject, c.baseline, c.value, c, c, c.p_value, c.noise_floor, c.num_samples, c.verdict) for c in rows
        ),
        note=chance_note(len(tasks)),
    )


def _difference(c: Comparison) -> str:
    digits = 4 if c.baseline <= 1 else 3
    between = "" if c.low is None else f" ({signed(c.low, digits)} to {signed(c.high, digits)})"
    return f"{signed(c.difference, digits)}{between}"


def verdict_table() -> Table:
    """Create the table that explains the verdicts."""
    return Table(title="Verdicts", columns=(Column("verdict"), Column("meaning")), rows=tuple(VERDICTS.items()))


def length_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Create the table of answer lengths, and whether each is inside the allowed band."""
    low, high = LENGTH_BAND
    rows = tuple(
        (
            c.subject.removeprefix(f"{ANSWER_LENGTH}: "),
            *(c.baseline, c.value, c),
            "inside" if low <= c.value / c.baseline <= high else "outside",
        )
        for c in comparisons
        if c.subject.startswith(ANSWER_LENGTH) and c.baseline > 0
    )
    numbers = (
        Column("original", number),
        Column("model", number),
        Column("of the original (95 % interval)", recovery_text),
    )
    title = f"Length of generated answers, tokens; the band is {100 * low:.0f} to {100 * high:.0f} % of the original"
    return Table(title=title, columns=(Column("task"), *numbers, Column("band")), rows=rows) if rows else None


def fidelity_table(fidelity: FidelityResult | None, noise: FidelityResult | None) -> Table | None:
    """Create the table of distances from the original: the model's, and those of the original in another dtype."""
    if fidelity is None:
        return None
    kinds: tuple[tuple[str, Callable[[FidelityResult], str]], ...] = (
        ("mean KL, nats per token", _mean_kl),
        ("99th percentile of KL", lambda f: number(f.p99_kl)),
        ("largest KL", lambda f: number(f.max_kl)),
        ("same likeliest token, share", lambda f: four_digits(f.top1_agreement)),
        ("equal tokens before greedy texts differ (median)", _first_divergence),
        ("prompts whose greedy texts are equal", _agree_throughout),
    )
    rows = [(name, show(fidelity), None if noise is None else show(noise)) for name, show in kinds]
    if noise is not None:
        rows.insert(1, ("mean KL to expect in another dtype", " to ".join(map(number, fidelity.within(noise))), None))
    return Table(
        title=f"On {fidelity.data}, {fidelity.num_tokens:,} tokens",
        columns=(Column(), Column("model", str), Column("original, other dtype", str)),
        rows=tuple(rows),
        note="" if fidelity.top is None else _known_tokens(fidelity),
    )


def drift_table(drift: DriftResult | None) -> Table | None:
    """Create the table of KL to the original while decoding: by position in the original's texts, and its drift."""
    if drift is None:
        return None
    stretches = zip((0, *drift.ends[:-1]), drift.ends, drift.part_kl, strict=True)
    rows = [(f"mean KL, tokens {start + 1:,} to {end:,}", number(kl)) for start, end, kl in stretches]
    between = "" if drift.slope_low is None else f" ({interval(drift.slope_low, drift.slope_high, 4)})"
    # A text without a difference counts with its whole length: a median tolerates such censored values.
    first = median([drift.num_tokens if at is None else at for at in drift.first_difference])
    rows += [
        ("drift: increase of KL per 1,000 tokens (95 % interval)", f"{drift.slope:.4f}{between}"),
        (
            "tokens before the likeliest token differs (median)",
            MISSING if first is None else f"{first:g}{' or more' * (first == drift.num_tokens)}",
        ),
    ]
    return Table(
        title=f"While decoding: {counted(drift.num_texts, 'text')} by the original, {drift.num_tokens:,} tokens each",
        columns=(Column(), Column("model", str)),
        rows=tuple(rows),
    )


def _mean_kl(fidelity: FidelityResult) -> str:
    low = "" if fidelity.mean_kl_low is None else f"{number(fidelity.mean_kl_low)} to "
    return low + number(fidelity.mean_kl)


def _known_tokens(fidelity: FidelityResult) -> str:
    """Explain the bounds of a KL that was computed from the likeliest tokens."""
    share = "" if fidelity.remainder is None else f" (probability {percent(100 * fidelity.remainder, 2)})"
    return (
        f"Both models ran in {fidelity.engine}, which gives only the {fidelity.top} likeliest tokens of a position. "
        f"The lower bound treats all other tokens{share} as one token. The upper bound assumes that the probability of "
        "each other token fell by the same factor as that of the known token that lost most. Gates, percentile and "
        "largest KL use the upper bound."
    )


def _first_divergence(fidelity: FidelityResult) -> str:
    """Format the median position of the first greedy token that differs."""
    length = fidelity.greedy_tokens
    # A prompt that agrees throughout counts with its whole length: a median tolerates such censored values.
    middle = median([length if d is None else d for d in fidelity.first_divergence])
    return MISSING if middle is None else f"{middle:g} of {length}"


def _agree_throughout(fidelity: FidelityResult) -> str:
    agreed = fidelity.first_divergence.count(None)
    return f"{agreed} of {len(fidelity.first_divergence)}" if fidelity.first_divergence else MISSING


def worst_groups_table(sensitivity: SensitivityMap) -> Table:
    """Create the table of the fused groups with the largest KL, and their share of the sum."""
    total = sensitivity.sum_kl or 1.0
    return Table(
        title="Most sensitive fused groups, each quantized alone",
        columns=(
            *(Column("fused group"), Column("KL, nats per token", number)),
            *(Column("share of the sum", percent), Column("bytes in 16 bits", byte_size)),
        ),
        rows=tuple(
            (f"layer {r.layer} {r.group}", r.kl, 100 * r.kl / total, r.dense_bytes or None)
            for r in sensitivity.worst(8)
        ),
        note=_additivity_note(sensitivity),
    )


def _additivity_note(sensitivity: SensitivityMap) -> str:
    if sensitivity.additivity is None:
        return ""
    sums = f"All at once: KL {number(sensitivity.total_kl)}; sum of the groups: {number(sensitivity.sum_kl)}"
    # 1.4 is about 1 / 0.7, so the range allows the same factor in both directions.
    adds_up = 0.7 <= sensitivity.additivity <= 1.4
    reading = "so the parts add up" if adds_up else "so the groups interact; single values are less reliable"
    return f"{sums} ({percent(100 * sensitivity.additivity, 0)}), {reading}."


def sensitivity_table(sensitivity: SensitivityMap) -> Table:
    """Create the table of the whole sensitivity map."""
    values = {(record.layer, record.group): record.kl for record in sensitivity.records}
    return layer_table("KL of every fused group quantized alone, nats per token", values, number)


def layer_table(title: str, values: Mapping[tuple[int, str], Any], show: Callable[[Any], str] | None = None) -> Table:
    """Create a table with a row per layer and a column per fused group.

    Args:
        title: title of the table.
        values: values, keyed by (layer, fused group).
        show: see `Column`.
    """
    groups = list(dict.fromkeys(group for _, group in values))
    layers = sorted({layer for layer, _ in values})
    return Table(
        title=title,
        columns=(Column("layer"), *(Column(group, show) for group in groups)),
        rows=tuple((str(layer), *(values.get((layer, group)) for group in groups)) for layer in layers),
    )


def environment_table(report: Report) -> Table:
    """Create the table of the machine and software that produced the numbers."""
    env = report.environment
    settings = report.evaluation.settings if report.evaluation else {}
    kinds = (("version of", env.versions), ("seed of", env.seeds), ("hash of", env.hashes), ("setting:", settings))
    rows = [("command", env.command), ("machine", env.platform), ("processor", env.cpu), ("device", env.device)]
    rows.append(("threads", str(env.num_threads) if env.num_threads else ""))
    rows += [(f"{kind} {name}", str(entry)) for kind, entries in kinds for name, entry in sorted(entries.items())]
    return facts([*rows, ("made", env.created)], title="Environment")


def storage_rows(
    bits: float | None, made: CheckpointSummary | CompressionResult | None
) -> list[tuple[str, str | None]]:
    """Return rows about the storage of weights and cache, for tables of facts.

    Args:
        bits: average bits per weight of the quantized linears; None or 0 if there are none.
        made: summary or compression record for the other rows; None if unknown.
    """
    tower, mtp, layers = (made.tower, made.mtp, made.layers) if made else (None, None, ())
    return [
        ("bits per weight", f"{bits:.3f} (quantized linears)" if bits else None),
        ("towers", tower.describe() if tower else None),
        ("MTP heads", mtp.describe() if mtp else None),
        ("KV cache", describe_caches(layers)),
        ("experts", describe_experts(layers)),
    ]


def describe_adapter(report: Report) -> str:
    """Return a line about the adapter that was merged, or that both models computed with; "" = none."""
    made = report.compression
    if made is not None and made.adapter is not None:
        return made.adapter.describe()
    used = report.evaluation.settings.get("adapter") if report.evaluation else None
    if used is None:  # no evaluation, but notes about the engine
        of_adapters = (note.removeprefix("adapter ") for note in report.notes if note.startswith("adapter "))
        used = next((text for text in of_adapters if ", SHA-256 " in text), None)
    return f"{used}, applied to both models" if used else ""


def making_table(report: Report) -> Table:
    """Create the table of facts about the checkpoint and its compression."""
    model, made = report.model, report.compression
    rows = [
        ("original", report.baseline_model.name if report.baseline_model else ""),
        ("adapter", describe_adapter(report)),
        ("recipe", made.recipe if made else ""),
        ("scheme", model.scheme),
        ("format", model.format),
        ("architecture", model.architecture),
        ("parameters", f"{model.num_parameters:,}" if model.num_parameters else ""),
        *storage_rows(model.bits_per_weight, made),
        ("size", byte_size(model.num_bytes or None)),
        ("calibration", made.calibration.describe() if made and made.calibration else ""),
        ("ignored", ", ".join(made.ignored) if made else ""),
        ("time to make", f"{sum(made.seconds.values()):,.0f} s" if made and made.seconds else ""),
        ("peak memory", byte_size(made.peak_bytes) if made and made.peak_bytes else ""),
    ]
    return facts(rows, title="How it was made")
