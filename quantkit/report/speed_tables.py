"""The tables of a report about speed and memory; `quantkit bench` shows the same."""

from collections.abc import Iterable, Iterator
from typing import Any

from quantkit.quantities import byte_size, duration, number, percent, short
from quantkit.report.table import Column, Table
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, MemoryRecord, Report, RooflineRecord
from quantkit.results.statistics.summary import fit_gaps, quantiles

Runs = Iterable[tuple[str, BenchmarkRun]]  # each with a label: which workload, of which model


def report_runs(report: Report) -> Iterator[tuple[str, BenchmarkRun]]:
    """Runs by workload, original before model."""
    for run, other in report.paired_runs:
        if other:
            yield f"{run.workload.name}, original", other
        yield f"{run.workload.name}, model", run


def _serving(runs: Runs) -> list[tuple[str, BenchmarkRun]]:
    """Leave out the run that only serves the fits: its requests differ in length and have no latency in common."""
    return [(label, run) for label, run in runs if run.workload.name != SWEEP_NAME]


def latency_table(runs: Runs) -> Table | None:
    """Percentiles of TTFT, ITL and TPOT of each run."""
    rows = tuple(
        (label, name, q.p50, q.p90, q.p99, q.mean, q.count)
        for label, run in _serving(runs)
        for name, values in run.latencies.items()
        if (q := quantiles(values)) is not None
    )
    times = (Column(name, duration) for name in ("p50", "p90", "p99", "mean"))
    columns = (Column("workload"), Column("latency"), *times, Column("n", "{:,}".format))
    note = "With fewer than 100 values the 99th percentile lies between the two largest."
    return Table(title="Latency", columns=columns, rows=rows, note=note) if rows else None


def throughput_table(runs: Runs) -> Table | None:
    """Rates of each run."""
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


def fit_table(runs: Runs) -> Table | None:
    """ITL = a + b * context of each run, with standard errors."""
    rows = []
    for label, run in runs:
        line = fit_gaps(run)
        if line is not None:
            scaled = zip((1e3, 1e6), line.coefficients, line.standard_errors, strict=True)
            terms = (f"{number(scale * value)} ± {number(scale * error, 2)}" for scale, value, error in scaled)
            rows.append((label, *terms, f"{line.num_dropped} of {line.num_points + line.num_dropped}"))
    if not rows:
        return None
    titles = ("a, ms", "b, ms per 1,000 tokens", "stalls left out")
    return Table(
        title="Inter-token latency = a + b * context, ± one standard error",
        columns=(Column("workload"), *(Column(title, str) for title in titles)),
        rows=tuple(rows),
        note="a is weights and overhead, b the KV cache.",
    )


def memory_table(benchmark: BenchmarkResult | None, baseline: BenchmarkResult | None = None) -> Table | None:
    """Each part of memory, predicted beside observed, and the original's where there is one."""
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
    """Return how far a prediction was off."""
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
    """Each kind of step: what it moves and computes, its time, the floor of this machine, the share of its ceilings.

    Args:
        records: each with the name of its model, which is empty where there is only one.
    """
    kept = list(records)
    if not kept:
        return None
    return Table(
        title="Steps against the ceilings measured in the same run",
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
    """Return the measured ceilings, and the meaning of the words that stand for shares above 100 %."""
    # All records of a run carry the same ceilings, so any of them serves.
    rates = f"{records[-1].copy_bytes_per_s / 1e9:.1f} GB/s, {records[-1].gemm_flops_per_s / 1e9:.0f} GFLOP/s"
    text = f"MBU and MFU are shares of the ceilings measured in this run: {rates}."
    words = {"caches": "reads faster than memory", "busy": "the machine was busier while its ceilings were measured"}
    shown = {r.shown_share(share) for r in records for share in (r.mbu, r.mfu)}
    legend = "; ".join(f"{word}: {meaning}" for word, meaning in words.items() if word in shown)
    return f"{text} {legend}." if legend else text
