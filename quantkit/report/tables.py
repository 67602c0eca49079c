"""The tables of a report as rows of text, made once and shown in HTML, Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.report.words import (
    MISSING,
    VERDICTS,
    byte_size,
    chance_note,
    duration,
    interval,
    number,
    p_value,
    percent,
    recovery_text,
    signed,
)
from quantkit.results import BenchmarkResult, BenchmarkRun, Comparison, FidelityResult, Report, SensitivityMap
from quantkit.results.statistics import ALL_TASKS, ANSWER_LENGTH, LENGTH_BAND, fit, median_interval, quantiles

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Text in rows; the first column names the row.

    Args:
        caption: what the table shows.
        columns: their headings.
        rows: as many cells as headings each.
        note: to be printed below; empty for none.
    """

    caption: str
    columns: Row
    rows: tuple[Row, ...]
    note: str = ""


def key_figures(report: Report) -> list[tuple[str, str, str]]:
    """What one wants to know first: (name, figure, what it is beside)."""
    found = []
    model, original = report.model, report.baseline_model
    if original is not None and original.num_bytes and model.num_bytes:
        share = percent(100 * model.num_bytes / original.num_bytes, 0)
        found.append(("Size", share, f"{byte_size(model.num_bytes)} of {byte_size(original.num_bytes)} on disk"))
    tasks = report.find_comparison(ALL_TASKS)
    if tasks is not None:
        beside = f"95 % interval {interval(tasks.recovery_low, tasks.recovery_high)}: {tasks.verdict}"
        found.append(("Recovery", percent(tasks.recovery), beside))
    text = next((c for c in report.comparisons if c.subject.startswith("perplexity")), None)
    if text is not None:
        beside = f"{number(text.baseline)} before, {number(text.value)} now: {text.verdict}"
        found.append(("Perplexity", f"{number(text.value / text.baseline, 4)}x", beside))
    latency = _median_latency(report)
    if latency is not None:
        ours, theirs, workload = latency
        figure = duration(ours) if theirs is None else f"{number(ours / theirs)}x"
        beside = workload if theirs is None else f"{duration(theirs)} before, {duration(ours)} now, {workload}"
        found.append(("Time between tokens", figure, beside))
    return found


def _median_latency(report: Report) -> tuple[float, float | None, str] | None:
    if report.benchmark is None or not report.benchmark.runs or not report.benchmark.runs[0].inter_token_s:
        return None
    run = report.benchmark.runs[0]
    other = report.baseline_benchmark and report.baseline_benchmark.find_run(run.workload.name)
    theirs = median_interval(other.inter_token_s)[0] if other and other.inter_token_s else None
    return median_interval(run.inter_token_s)[0], theirs, run.workload.name


def comparison_table(report: Report) -> Table | None:
    """Every task and text: both values, the difference with its interval, recovery and verdict."""
    rows = [c for c in report.comparisons if not c.subject.startswith(ANSWER_LENGTH)]
    if not rows:
        return None
    tasks = [c for c in rows if not c.subject.startswith("perplexity") and c.subject != ALL_TASKS]
    return Table(
        caption="Model beside original, same items",
        columns=("", "original", "model", "difference (95 %)", "recovery (95 %)", "p", "noise", "n", "verdict"),
        rows=tuple(_comparison_row(c) for c in rows),
        note=chance_note(len(tasks)),
    )


def _comparison_row(c: Comparison) -> Row:
    digits = 4 if c.baseline <= 1 else 3
    between = "" if c.low is None else f" ({signed(c.low, digits)} to {signed(c.high, digits)})"
    return (
        c.subject,
        number(c.baseline, 4),
        number(c.value, 4),
        f"{signed(c.difference, digits)}{between}",
        recovery_text(c),
        p_value(c.p_value),
        MISSING if c.noise_floor is None else f"±{number(c.noise_floor, 2)}",
        f"{c.num_samples:,}",
        c.verdict,
    )


def verdict_table() -> Table:
    """What the verdicts mean."""
    return Table(caption="Verdicts", columns=("verdict", "meaning"), rows=tuple(VERDICTS.items()))


def length_table(report: Report) -> Table | None:
    """Length of generated answers against the band."""
    rows = []
    for c in report.comparisons:
        if c.subject.startswith(ANSWER_LENGTH) and c.baseline > 0:
            inside = LENGTH_BAND[0] <= c.value / c.baseline <= LENGTH_BAND[1]
            task = c.subject.removeprefix(f"{ANSWER_LENGTH}: ")
            cells = (number(c.baseline), number(c.value), recovery_text(c), "inside" if inside else "outside")
            rows.append((task, *cells))
    low, high = (f"{100 * share:.0f}" for share in LENGTH_BAND)
    caption = f"Length of generated answers, tokens; the band is {low} to {high} % of the original"
    columns = ("task", "original", "model", "of the original (95 %)", "band")
    return Table(caption=caption, columns=columns, rows=tuple(rows)) if rows else None


def fidelity_table(report: Report) -> Table | None:
    """Distance to the original, and the original's to itself under other arithmetic."""
    if report.fidelity is None:
        return None
    noise = report.noise_fidelity

    def row(name: str, read: str, digits: int = 3) -> Row:
        own = MISSING if noise is None else number(getattr(noise, read), digits)
        return name, number(getattr(report.fidelity, read), digits), own

    rows = (
        row("mean KL, nats per token", "mean_kl"),
        row("99th percentile of KL", "p99_kl"),
        row("largest KL", "max_kl"),
        row("same likeliest token, share", "top1_agreement", 4),
        ("greedy text agrees for, tokens (median)", divergence_text(report.fidelity), divergence_text(noise)),
    )
    caption = f"On {report.fidelity.data}, {report.fidelity.num_tokens:,} tokens"
    return Table(caption=caption, columns=("", "model", "original, other arithmetic"), rows=rows)


def divergence_text(fidelity: FidelityResult | None) -> str:
    """Median position of the first greedy token that differs, and how many never do."""
    if fidelity is None or not fidelity.first_divergence:
        return MISSING
    length = fidelity.greedy_tokens
    middle = median_interval([length if d is None else d for d in fidelity.first_divergence])[0]
    never = sum(d is None for d in fidelity.first_divergence)
    return f"{middle:g} of {length}; {never} of {len(fidelity.first_divergence)} prompts throughout"


def worst_sensitivity_table(sensitivity: SensitivityMap, count: int = 8) -> Table:
    """The units that hurt most and their share of the whole."""
    total = sensitivity.sum_kl or 1.0
    rows = tuple(
        (f"layer {r.layer} {r.unit}", number(r.kl), percent(100 * r.kl / total), byte_size(r.dense_bytes or None))
        for r in sensitivity.worst(count)
    )
    return Table(
        caption="Worst units, each quantized alone",
        columns=("unit", "KL, nats per token", "share of the sum", "bytes in 16 bits"),
        rows=rows,
        note=_additivity_note(sensitivity),
    )


def _additivity_note(sensitivity: SensitivityMap) -> str:
    if sensitivity.additivity is None:
        return ""
    sums = f"All at once: KL {number(sensitivity.total_kl)}; sum of the parts: {number(sensitivity.sum_kl)}"
    reading = (
        "so the parts add up"
        if 0.7 <= sensitivity.additivity <= 1.4
        else "so parts interact: read single units with care"
    )
    return f"{sums} ({percent(100 * sensitivity.additivity, 0)}), {reading}."


def sensitivity_table(sensitivity: SensitivityMap) -> Table:
    """The whole map: layers down, units across."""
    units = list(dict.fromkeys(record.unit for record in sensitivity.records))
    values = {(record.layer, record.unit): number(record.kl) for record in sensitivity.records}
    layers = sorted({record.layer for record in sensitivity.records})
    rows = tuple((str(layer), *(values.get((layer, unit), MISSING) for unit in units)) for layer in layers)
    return Table(caption="KL of every unit quantized alone, nats per token", columns=("layer", *units), rows=rows)


def latency_table(report: Report) -> Table | None:
    """Percentiles of TTFT, ITL and TPOT of each workload, both models."""
    rows = []
    for side, run in _runs(report):
        for name, values in (("TTFT", run.ttft_s), ("ITL", run.inter_token_s), ("TPOT", run.tpot_s)):
            found = quantiles(values)
            if found is not None:
                times = (duration(t) for t in (found.p50, found.p90, found.p99, found.mean))
                rows.append((f"{run.workload.name}, {side}", name, *times, f"{found.count:,}"))
    columns = ("workload", "latency", "p50", "p90", "p99", "mean", "n")
    note = "With fewer than 100 values the 99th percentile lies between the two largest."
    return Table(caption="Latency", columns=columns, rows=tuple(rows), note=note) if rows else None


def throughput_table(report: Report) -> Table | None:
    """Rates of each workload, both models."""
    rows = []
    for side, run in _runs(report):
        load = run.workload
        how = f"{load.concurrency} at a time" if load.mode == "closed" else f"{number(load.rate_per_s)} arrivals per s"
        rates = (number(rate) for rate in (run.output_tokens_per_s, run.requests_per_s, run.goodput_per_s))
        rows.append((f"{load.name}, {side}", how, f"{load.prompt_tokens} / {load.new_tokens}", *rates))
    columns = ("workload", "load", "prompt / new tokens", "tokens/s", "requests/s", "goodput/s")
    return Table(caption="Throughput", columns=columns, rows=tuple(rows), note=_limits(report)) if rows else None


def _limits(report: Report) -> str:
    loads = [run.workload for _, run in _runs(report) if run.goodput_per_s is not None]
    if not loads:
        return ""
    ttft, tpot = loads[0].ttft_limit_s, loads[0].tpot_limit_s
    limits = [f"{name} {duration(limit)}" for name, limit in (("TTFT", ttft), ("TPOT", tpot)) if limit is not None]
    return f"Goodput counts requests that met every limit: {' and '.join(limits)}."


def _runs(report: Report) -> Iterator[tuple[str, BenchmarkRun]]:
    """Runs by workload, original before model."""
    for run in report.benchmark.runs if report.benchmark else ():
        other = report.baseline_benchmark and report.baseline_benchmark.find_run(run.workload.name)
        if other:
            yield "original", other
        yield "model", run


def fit_table(report: Report) -> Table | None:
    """ITL = a + b * context of each workload, with standard errors."""
    rows = []
    for side, run in _runs(report):
        points = [point for timing in run.requests for point in timing.context_gaps]
        line = fit([p[0] for p in points], [p[1] for p in points])
        if line is not None:
            (a, b), (a_error, b_error) = line.coefficients, line.standard_errors
            rows.append(
                (
                    f"{run.workload.name}, {side}",
                    f"{number(1e3 * a)} ± {number(1e3 * a_error, 2)}",
                    f"{number(1e6 * b)} ± {number(1e6 * b_error, 2)}",
                    f"{line.num_dropped} of {line.num_points + line.num_dropped}",
                )
            )
    return (
        Table(
            caption="Inter-token latency = a + b * context, ± one standard error",
            columns=("workload", "a, ms", "b, ms per 1,000 tokens", "stalls left out"),
            rows=tuple(rows),
            note="a is weights and overhead, b the KV cache.",
        )
        if rows
        else None
    )


def memory_table(report: Report) -> Table | None:
    """Each part of memory, predicted beside observed, and the original's."""
    if report.benchmark is None or not report.benchmark.memory:
        return None
    rows = []
    for record in report.benchmark.memory:
        theirs = report.baseline_benchmark and report.baseline_benchmark.memory_part(record.part)
        error = MISSING
        if record.predicted_bytes and record.observed_bytes:
            error = percent(100 * (record.predicted_bytes / record.observed_bytes - 1))
        sizes = (byte_size(record.predicted_bytes), byte_size(record.observed_bytes), error)
        rows.append((record.part, *sizes, byte_size(theirs.observed_bytes if theirs else None), record.note))
    columns = ("part", "predicted", "observed", "prediction off by", "original, observed", "")
    return Table(caption="Memory of the model", columns=columns, rows=tuple(rows), note=_capacity(report.benchmark))


def _capacity(benchmark: BenchmarkResult) -> str:
    if benchmark.capacity_tokens is None:
        return ""
    kind = f" in {benchmark.kv_cache}" if benchmark.kv_cache else ""
    return f"The KV pool holds {benchmark.capacity_tokens:,} tokens{kind}."


def roofline_table(report: Report) -> Table | None:
    """Each kind of step: time, the floor of this machine, and the share of its ceilings."""
    rows = []
    for side, benchmark in (("original", report.baseline_benchmark), ("model", report.benchmark)):
        for r in benchmark.roofline if benchmark else ():
            times = duration(r.seconds), duration(r.floor_s)
            shares = r.shown_share(r.mbu), r.shown_share(r.mfu)
            rows.append((f"{side}, {r.phase}", f"{r.batch} x {r.context}", *times, *shares, r.bound_by))
    columns = ("step", "batch x context", "time", "floor", "of copy", "of matrix product", "bound by")
    caption = "Steps against the ceilings measured in the same run"
    return Table(caption=caption, columns=columns, rows=tuple(rows)) if rows else None


def environment_table(report: Report) -> Table:
    """Where and with what the numbers were made."""
    env = report.environment
    rows = [("command", env.command), ("machine", env.platform), ("processor", env.cpu), ("device", env.device)]
    rows.append(("threads", str(env.num_threads) if env.num_threads else ""))
    for title, entries in (("version", env.versions), ("seed", env.seeds), ("hash", env.hashes)):
        rows += [(f"{title} of {name}", str(entry)) for name, entry in sorted(entries.items())]
    rows += [
        (f"setting: {key}", value)
        for key, value in sorted((report.evaluation.settings if report.evaluation else {}).items())
    ]
    rows.append(("made", env.created))
    return Table(caption="Environment", columns=("", ""), rows=tuple(row for row in rows if row[1]))


def making_table(report: Report) -> Table:
    """What the checkpoint is and how it was made."""
    model, made = report.model, report.compression
    rows = [
        ("original", report.baseline_model.name if report.baseline_model else ""),
        ("recipe", made.recipe if made else ""),
        ("scheme", model.scheme),
        ("format", model.format),
        ("architecture", model.architecture),
        ("parameters", f"{model.num_parameters:,}" if model.num_parameters else ""),
        ("bits per weight", f"{model.bits_per_weight:.3f} (quantized linears)" if model.bits_per_weight else ""),
        ("size", byte_size(model.num_bytes or None)),
        ("ignored", ", ".join(made.ignored) if made else ""),
        ("time to make", f"{sum(made.seconds.values()):,.0f} s" if made and made.seconds else ""),
        ("peak memory", byte_size(made.peak_bytes) if made and made.peak_bytes else ""),
    ]
    return Table(caption="How it was made", columns=("", ""), rows=tuple(row for row in rows if row[1]))
