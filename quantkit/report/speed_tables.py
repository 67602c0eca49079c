"""Tables of a report about speed and memory; `quantkit bench` prints the same tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantkit.quantities import byte_size, counted, duration, number, percent, short
from quantkit.report.table import Column, Table
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, Diagnosis, MemoryRecord, Report, RooflineRecord
from quantkit.results.statistics.summary import PolynomialFit, quantiles

if TYPE_CHECKING:
    from quantkit.benchmark.compare import Ratio
    from quantkit.benchmark.run import CacheComparison

LATENCIES = {
    "TTFT": ("time to first token", "from the arrival of the request to its first token."),
    "ITL": ("inter-token latency", "every gap between tokens, over all requests; its tail shows stalls."),
    "TPOT": ("time per output token", "mean gap between tokens, one value per request; hides stalls."),
}
DEFINITIONS = "\n".join(
    (*(f"{name}: {text}" for name, (_, text) in LATENCIES.items()), "Tokens of one speculative step share its time.")
)

Runs = Iterable[tuple[str, BenchmarkRun]]  # each with a label: which workload, of which model


def report_runs(report: Report) -> Iterator[tuple[str, BenchmarkRun]]:
    """Yield (label, run) for each workload: the original's run, if there is one, then the model's run. If only one of
    them speculates, its label says so.
    """
    sides = report.baseline_benchmark, report.benchmark
    drafts = [side is not None and "speculation" in side.settings for side in sides]
    theirs, ours = (" with drafts" if drafts[side] and not all(drafts) else "" for side in (0, 1))
    for run, other in report.paired_runs:
        if other:
            yield f"{run.workload.name}, original{theirs}", other
        yield f"{run.workload.name}, model{ours}", run


def _serving(runs: Runs) -> list[tuple[str, BenchmarkRun]]:
    """Return all runs except the sweep, which serves only to fit latency as a function of length. The requests of the
    sweep differ in length, so percentiles of their latencies would be meaningless.
    """
    return [(label, run) for label, run in runs if run.workload.name != SWEEP_NAME]


def latency_table(runs: Runs) -> Table | None:
    """Create the table of TTFT, ITL and TPOT percentiles of each run."""
    rows = tuple(
        (label, name, *q.values())
        for label, run in _serving(runs)
        for name, values in run.latencies.items()
        if (q := quantiles(values)) is not None
    )
    times = (Column(name, duration) for name in ("p50", "p90", "p99", "mean"))
    columns = (Column("workload"), Column("latency"), *times, Column("n", "{:,}".format))
    note = "With fewer than 100 values the 99th percentile lies between the two largest."
    return Table(title="Latency", columns=columns, rows=rows, note=note) if rows else None


def throughput_table(runs: Runs) -> Table | None:
    """Create the table of tokens, requests and goodput per second of each run."""
    serving = _serving(runs)
    rows = []
    for label, run in serving:
        load = run.workload
        how = f"{load.concurrency} at a time" if load.mode == "closed" else f"{number(load.rate_per_s)} arrivals per s"
        rates = run.output_tokens_per_s, run.requests_per_s, run.goodput_per_s
        rows.append((label, how, f"{load.prompt_tokens} / {load.new_tokens}", *rates))
    columns = (
        *(Column("workload"), Column("load"), Column("prompt / new tokens", detail=True)),
        *(Column(name, number) for name in ("tokens/s", "requests/s", "goodput/s")),
    )
    return Table(title="Throughput", columns=columns, rows=tuple(rows), note=_limits(serving)) if rows else None


def _limits(runs: Runs) -> str:
    load = next((run.workload for _, run in runs if run.goodput_per_s is not None), None)
    if load is None:
        return ""
    pairs = (("TTFT", load.ttft_limit_s), ("TPOT", load.tpot_limit_s))
    limits = [f"{name} {duration(limit)}" for name, limit in pairs if limit is not None]
    return f"Goodput counts requests that met every limit: {' and '.join(limits)}."


def fit_table(fits: Iterable[tuple[str, PolynomialFit | None]]) -> Table | None:
    """Create the table of polynomials fitted to latencies: coefficients, standard errors and dropped stalls."""
    known = [(label, fit) for label, fit in fits if fit is not None]
    if not known:
        return None
    size, rows = max(len(fit.coefficients) for _, fit in known), []
    for label, fit in known:
        # Seconds to milliseconds, and each power of tokens to thousands.
        scaled = zip((1e3, 1e6, 1e9), fit.coefficients, fit.standard_errors, strict=False)
        terms = [f"{number(scale * value)} ± {number(scale * error, 2)}" for scale, value, error in scaled]
        stalls = f"{fit.num_dropped} of {fit.num_points + fit.num_dropped}"
        rows.append((label, *terms, *[None] * (size - len(terms)), stalls))
    titles = (*("a, ms", "b, ms/1,000", "c, ms/1,000²")[:size], "stalls left out")
    return Table(
        title="Latency = a + b * tokens + c * tokens², ± one standard error",
        columns=(Column(), *(Column(title, str) for title in titles)),
        rows=tuple(rows),
        note=(
            "For ITL, the number of tokens is the context length; for TTFT, it is the prompt length. a is the cost of "
            "weights and overhead; for ITL, b is the cost of the KV cache."
        ),
    )


def memory_table(benchmark: BenchmarkResult | None, baseline: BenchmarkResult | None = None) -> Table | None:
    """Create the table of memory by part: predicted, observed, and observed for the original if there is one."""
    if benchmark is None or not benchmark.memory:
        return None
    columns = [Column("part"), Column("predicted", byte_size), Column("observed", byte_size)]
    columns += [Column("prediction off by", str), Column("original, observed", byte_size), Column(detail=True)]
    rows: list[tuple[Any, ...]] = []
    for record in benchmark.memory:
        original = baseline and baseline.memory_part(record.part)
        sizes = record.predicted_bytes, record.observed_bytes
        rows.append((record.part, *sizes, _miss(record), original.observed_bytes if original else None, record.note))
    if baseline is None:
        columns, rows = [*columns[:4], *columns[5:]], [(*row[:4], *row[5:]) for row in rows]
    return Table(title="Memory of the model", columns=tuple(columns), rows=tuple(rows), note=_capacity(benchmark))


def _miss(record: MemoryRecord) -> str | None:
    """Return the error of a prediction, in per cent of the observed bytes."""
    if not record.predicted_bytes or not record.observed_bytes:
        return None
    if record.predicted_bytes == record.observed_bytes:
        return "exact"
    return percent(100 * (record.predicted_bytes / record.observed_bytes - 1))


def _capacity(benchmark: BenchmarkResult) -> str:
    if benchmark.capacity_tokens is None:
        return ""
    kind = f" in {benchmark.kv_cache}" if benchmark.kv_cache else ""
    return f"The KV pool holds {benchmark.capacity_tokens:,} tokens{kind}."


def roofline_table(records: Iterable[tuple[str, RooflineRecord]]) -> Table | None:
    """Create the table of steps: bytes moved, operations, time, minimum time on this machine, and shares of the
    machine's ceilings.

    Args:
        records: (name of the model, record); the name is "" if there is only one model.
    """
    kept = list(records)
    if not kept:
        return None
    return Table(
        title="Steps compared with the ceilings measured in the same run",
        columns=(
            *(Column("step"), Column("context", "{:,}".format)),
            *(Column("MB", short, detail=True), Column("MFLOP", short, detail=True)),
            *(Column("time", duration), Column("floor", duration), Column("MBU", str), Column("MFU", str)),
            Column("bound by"),
        ),
        rows=tuple(_roofline_row(label, record) for label, record in kept),
        note=_ceilings([record for _, record in kept]),
    )


def _roofline_row(label: str, r: RooflineRecord) -> tuple[object, ...]:
    step = f"prefill {r.num_tokens}" if r.phase == "prefill" else f"decode, batch {r.batch}"
    return (
        f"{label}, {step}" if label else step,
        *(r.context, r.bytes_moved / 1e6, r.flops / 1e6, r.seconds, r.floor_s),
        *(r.shown_share(r.mbu), r.shown_share(r.mfu), r.bound_by),
    )


def _ceilings(records: list[RooflineRecord]) -> str:
    """Describe the measured ceilings, and the words that replace shares above 100 %."""
    # All records of a run carry the same ceilings, so any record will do.
    rates = f"{records[-1].copy_bytes_per_s / 1e9:.1f} GB/s, {records[-1].gemm_flops_per_s / 1e9:.0f} GFLOP/s"
    text = f"MBU and MFU are shares of the ceilings measured in this run: {rates}."
    words = {
        "caches": "the data came from processor caches",
        "busy": "the machine was busier while its ceilings were measured",
    }
    shown = {r.shown_share(share) for r in records for share in (r.mbu, r.mfu)}
    legend = "; ".join(f"{word}: {meaning}" for word, meaning in words.items() if word in shown)
    return f"{text} {legend}." if legend else text


def labelled_runs(results: Sequence[BenchmarkResult]) -> list[tuple[str, BenchmarkRun]]:
    """Return each run of all models, labelled with the model's name if there are several models."""
    suffixes = [f", {short_name(result.model)}" if len(results) > 1 else "" for result in results]
    together = zip(*(result.runs for result in results), strict=True)
    return [(run.workload.name + end, run) for runs in together for run, end in zip(runs, suffixes, strict=True)]


def explained_latency_table(runs: Sequence[tuple[str, BenchmarkRun]]) -> Table | None:
    """Return the latency table, with definitions of TTFT, ITL and TPOT in its note."""
    table = latency_table(runs)
    return table and replace(table, note=f"{DEFINITIONS}\n{table.note}")


def ratio_table(ratios: Sequence[Ratio], baseline: str) -> Table:
    """Return the table that compares the speed of a model with a baseline: both values, their ratio, the ratio's range
    over rounds, and its noise.
    """
    titles = "model", short_name(baseline), "ratio", "rounds", "noise"
    rows = []
    for ratio in ratios:
        show = number if ratio.metric == "tokens/s" else duration
        rows.append(
            (
                *(ratio.workload, ratio.metric, show(ratio.value), show(ratio.baseline), f"{ratio.ratio:.2f}"),
                *(f"{ratio.low:.2f} - {ratio.high:.2f}", f"{100 * ratio.noise:.0f} %", ratio.verdict),
            )
        )
    return Table(
        columns=(Column("run"), Column("metric"), *(Column(title, str) for title in titles), Column("verdict")),
        rows=tuple(rows),
        note="Medians, measured in turns (A B B A ...). For latencies, a ratio below 1 means that the model is faster. "
        "Rounds: smallest and largest ratio of a round. Noise: half the spread between the rounds of one model.",
    )


def short_name(model: str) -> str:
    """Return the last part of a path or hub id, for columns."""
    return model.rstrip("/").rpartition("/")[2] or model


def settings_lines(results: Sequence[BenchmarkResult]) -> str:
    """Describe where and with which settings each model ran."""
    names, lines = ("engine", "computed in", "threads", "linears", "KV budget", "speculation", "notes"), []
    for result in results:
        settings = [f"{name} {result.settings[name]}" for name in names if name in result.settings]
        lines.append(f"{result.model} on {result.device}; KV cache {result.kv_cache}; {'; '.join(settings)}")
    return "\n".join(lines)


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """Return the table of findings with evidence, advice and expected gain."""
    rows = []
    for position, finding in enumerate(diagnosis.findings, start=1):
        tips = {"Try": finding.advice, "Expected": finding.expected_gain}
        tried = [f"{word}: {text.rstrip('.')}." for word, text in tips.items() if text]
        rows.append((f"{position}.", "\n".join([finding.statement, finding.evidence, *tried])))
    return Table(title="Diagnosis", columns=(Column(), Column()), rows=tuple(rows))


def cache_table(comparison: CacheComparison) -> Table:
    """Return the table of the time that the KV cache saves, by number of generated tokens."""
    count = comparison.cached.num_new_tokens
    same = "both ways give the same tokens"
    if comparison.num_same < count:
        same = (
            f"both ways give the same {counted(comparison.num_same, 'token')} first; then rounding decided between "
            "nearly equal logits"
        )
    return Table(
        columns=(
            *(Column("new tokens", "{:,}".format), Column("with cache", duration), Column("recomputed", duration)),
            Column("ratio", "{:.1f}x".format),
        ),
        rows=tuple(comparison.marks()),
        note=(
            f"Time until this many tokens were generated, for a prompt of {comparison.cached.prompt_tokens} tokens; "
            f"{same}."
        ),
    )
