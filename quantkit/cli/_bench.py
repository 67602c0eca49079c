"""What `quantkit bench` shows: tables for people, and the same numbers as plain data for --json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from quantkit.benchmark.compare import Ratio
    from quantkit.benchmark.no_cache import CacheComparison
    from quantkit.results import BenchmarkResult, BenchmarkRun, Diagnosis
    from quantkit.results.statistics import Fit

DEFINITIONS = (
    "TTFT: request arrived to first token.\n"
    "ITL: every gap between successive tokens, pooled over requests; shows stalls.\n"
    "TPOT: (last token - first) / (tokens - 1), one per request; averages them out."
)


def numbers(result: BenchmarkResult, fits: dict[str, Fit | None], diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Everything about one model: raw timestamps, percentiles, fits, memory, roofline, diagnosis."""
    return {
        "benchmark": result.to_dict(),
        "summary": {run.workload.name: summary(run) for run in result.runs},
        "fits": {name: None if fit is None else asdict(fit) for name, fit in fits.items()},
        "roofline": [
            {"phase": r.phase, "batch": r.batch, "mbu": r.mbu, "mfu": r.mfu, "floor_s": r.floor_s, "bound": r.bound_by}
            for r in result.roofline
        ],
        "diagnosis": None if diagnosis is None else diagnosis.to_dict(),
    }


def summary(run: BenchmarkRun) -> dict[str, Any]:
    """Percentiles and rates of one run."""
    from quantkit.results.statistics import quantiles

    latencies = {"ttft_s": run.ttft_s, "itl_s": run.inter_token_s, "tpot_s": run.tpot_s}
    found = {name: quantiles(values) for name, values in latencies.items()}
    return {
        **{name: None if value is None else asdict(value) for name, value in found.items()},
        "tokens_per_s": run.output_tokens_per_s,
        "requests_per_s": run.requests_per_s,
        "goodput_per_s": run.goodput_per_s,
    }


def latency_table(results: Sequence[BenchmarkResult]) -> Group:
    """Percentiles: three rows per run and model."""
    several = len(results) > 1
    table = _table(["run", *(["model"] if several else []), "ms", "p50", "p90", "p99", "mean"], text=2 + several)
    for run, result in _by_run(results):
        found = summary(run)
        for name in ("ttft_s", "itl_s", "tpot_s"):
            first = name == "ttft_s"
            labels = [
                run.workload.name if first else "",
                *([short_name(result.model) if first else ""] if several else []),
            ]
            values = found[name] or {}
            cells = [_ms(values.get(column)) for column in ("p50", "p90", "p99", "mean")]
            table.add_row(*labels, name.removesuffix("_s").upper(), *cells)
    return _noted(table, DEFINITIONS)


def throughput_table(results: Sequence[BenchmarkResult]) -> Table | Group:
    """Rates: one row per run and model."""
    several = len(results) > 1
    limits = [(run.workload.ttft_limit_s, run.workload.tpot_limit_s) for run, _ in _by_run(results)]
    limited = any(limit != (None, None) for limit in limits)
    names = ["run", *(["model"] if several else []), "requests", "tokens/s", "requests/s"]
    table = _table([*names, *(["goodput/s"] if limited else [])], text=1 + several)
    for run, result in _by_run(results):
        rates = [run.output_tokens_per_s, run.requests_per_s, *([run.goodput_per_s] if limited else [])]
        labels = [run.workload.name, *([short_name(result.model)] if several else []), str(len(run.requests))]
        table.add_row(*labels, *map(_rate, rates))
    if not limited:
        return table
    bounds = zip(("TTFT", "TPOT"), limits[0], strict=True)
    told = [f"{name} up to {limit:g} s" for name, limit in bounds if limit is not None]
    return _noted(table, f"Goodput: requests per second with {' and '.join(told)}.")


def _by_run(results: Sequence[BenchmarkResult]) -> list[tuple[BenchmarkRun, BenchmarkResult]]:
    """Runs with their models, the same run of all models together; without the one for the fits."""
    from quantkit.benchmark.workload import SWEEP_NAME

    together = zip(*(result.runs for result in results), strict=True)
    pairs = [pair for runs in together for pair in zip(runs, results, strict=True)]
    return [(run, result) for run, result in pairs if run.workload.name != SWEEP_NAME]


def ratio_table(ratios: Sequence[Ratio], baseline: str) -> Group:
    """The model over the other, with the noise of the rounds."""
    table = _table(["run", "metric", "model", short_name(baseline), "ratio", "rounds", "noise", "verdict"], text=2)
    for ratio in ratios:
        show: Callable[[float | None], str] = _rate if ratio.metric == "tokens/s" else _ms
        table.add_row(
            *(ratio.workload, ratio.metric, show(ratio.value), show(ratio.baseline), f"{ratio.ratio:.2f}"),
            *(f"{ratio.low:.2f} - {ratio.high:.2f}", f"{100 * ratio.noise:.0f} %", ratio.verdict),
        )
    return _noted(
        table,
        "Medians, measured in turns (A B B A ...); latencies in ms, so a ratio below 1 is faster. Rounds: smallest and "
        "largest ratio of a round. Noise: half the spread of a model's own rounds.",
    )


def fit_lines(fits: dict[str, Fit | None]) -> Text:
    """Both fits as formulas with their standard errors."""
    from rich.text import Text

    lines = []
    for name, unit in (("ITL", "c"), ("TTFT", "p")):
        fit = fits[name]
        if fit is None:
            lines.append(f"{name} fit: too few different lengths")
            continue
        text = name
        for power, (value, error) in enumerate(zip(fit.coefficients, fit.standard_errors, strict=True)):
            scale = 1000 * 1000**power
            sign = "=" if power == 0 else "-" if value < 0 else "+"
            shown = value if power == 0 else abs(value)
            text += f" {sign} {scale * shown:.3g} (+/- {scale * error:.2g}) ms{_power(unit, power)}"
        dropped = f", {fit.num_dropped} stall{'s' * (fit.num_dropped > 1)} left out" if fit.num_dropped else ""
        lines.append(f"{text}; {fit.num_points} points{dropped}")
    lines.append("c: context, p: prompt, in 1,000 tokens; batch 1; standard errors in brackets")
    return Text("\n".join(lines))


def memory_table(result: BenchmarkResult) -> Table:
    """Predicted beside observed."""
    table = _table(["memory", "predicted", "observed", "difference", ""], text=1)
    for record in result.memory:
        known = record.predicted_bytes is not None and record.observed_bytes is not None
        table.add_row(
            record.part,
            _bytes(record.predicted_bytes),
            _bytes(record.observed_bytes),
            _difference(record.predicted_bytes, record.observed_bytes) if known else "",
            record.note,
        )
    return table


def roofline_table(result: BenchmarkResult) -> Table | Group:
    """Achieved against the limit that the ceilings allow."""
    table = _table(["step", "context", "MB", "MFLOP", "floor ms", "ms", "MBU", "MFU", "bound by"], text=1)
    shown: set[str] = set()
    for r in result.roofline:
        shares = r.shown_share(r.mbu), r.shown_share(r.mfu)
        shown.update(shares)
        name = f"prefill {r.num_tokens}" if r.phase == "prefill" else f"decode, batch {r.batch}"
        table.add_row(
            *(name, f"{r.context:,}", _short(r.bytes_moved / 1e6), _short(r.flops / 1e6), _ms(r.floor_s)),
            *(_ms(r.seconds), *shares, r.bound_by),
        )
    if not result.roofline:
        return table
    first = result.roofline[0]
    note = (
        f"Ceilings measured in this run: {first.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"{first.gemm_flops_per_s / 1e9:.0f} GFLOP/s."
    )
    words = {
        "caches": "reads faster than memory",
        "busy": "the machine was busier while its ceilings were measured",
    }
    legend = "; ".join(f"{word}: {meaning}" for word, meaning in words.items() if word in shown)
    return _noted(table, f"{note} {legend}." if legend else note)


def short_name(model: str) -> str:
    """The last part of a path or hub id, for columns."""
    return model.rstrip("/").rpartition("/")[2] or model


def settings_lines(results: Sequence[BenchmarkResult]) -> Text:
    """Where and how each model ran."""
    from rich.text import Text

    kept, lines = ("computed in", "threads", "linears", "speculation", "notes"), []
    for result in results:
        told = [f"{name} {result.settings[name]}" for name in kept if name in result.settings]
        lines.append(f"{result.model} on {result.device}; KV cache {result.kv_cache}; {'; '.join(told)}")
    return Text("\n".join(lines))


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """Findings with their evidence, what to try, and what that should bring."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Diagnosis", title_justify="left", title_style="bold", show_header=False, box=None)
    for number, finding in enumerate(diagnosis.findings, start=1):
        text = Text(finding.statement).append(f"\n{finding.evidence}", style="dim")
        if finding.advice:
            text.append(f"\nTry: {finding.advice}")
        if finding.expected_gain:
            text.append(f"{' ' if finding.advice else chr(10)}Expected: {finding.expected_gain}.")
        table.add_row(f"{number}.", text)
    return table


def cache_numbers(comparison: CacheComparison) -> dict[str, Any]:
    """Both ways' timestamps, and the ratio at some numbers of tokens."""
    return {
        "cached": comparison.cached.to_dict(),
        "recomputed": comparison.recomputed.to_dict(),
        "num_same_tokens": comparison.num_same,
        "marks": [{**asdict(mark), "ratio": mark.ratio} for mark in comparison.marks()],
    }


def cache_table(comparison: CacheComparison) -> Group:
    """What the KV cache saves, by number of generated tokens."""
    table = _table(["new tokens", "with cache", "recomputed", "ratio"], text=0)
    for mark in comparison.marks():
        cells = f"{mark.new_tokens:,}", f"{_ms(mark.cached_s)} ms", f"{_ms(mark.recomputed_s)} ms", f"{mark.ratio:.1f}x"
        table.add_row(*cells)
    count = comparison.cached.num_new_tokens
    same = "the same tokens both ways"
    if comparison.num_same < count:
        same = f"the first {comparison.num_same} tokens are the same both ways, then rounding decided a close call"
    return _noted(table, f"Time until so many tokens were there, prompt of {comparison.cached.prompt_tokens}; {same}.")


def _noted(table: Table, note: str) -> Group:
    """A table and a line below it, which may be wider than the table."""
    from rich.console import Group
    from rich.text import Text

    return Group(table, Text(note, style="dim"))


def _table(names: Sequence[str], *, text: int) -> Table:
    """A table whose first `text` columns and last one are text, the others numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for position, name in enumerate(names):
        is_text = position < text or name in ("", "verdict", "bound by")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def _power(unit: str, power: int) -> str:
    return "" if power == 0 else f" {unit}" if power == 1 else f" {unit}^{power}"


def _bytes(size: int | None) -> str:
    from quantkit.amounts import human_bytes

    return "-" if size is None else human_bytes(size)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _difference(predicted: int | None, observed: int | None) -> str:
    if predicted is None or not observed:
        return ""
    return "exact" if predicted == observed else f"{100 * (predicted / observed - 1):+.1f} %"
