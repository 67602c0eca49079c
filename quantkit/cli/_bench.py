"""What `quantkit bench` shows: tables for people, and the same numbers as plain data for --json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from quantkit.quantities import duration, number
from quantkit.report.table import Column, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from quantkit.benchmark.compare import Ratio
    from quantkit.benchmark.no_cache import CacheComparison
    from quantkit.results import BenchmarkResult, BenchmarkRun, Diagnosis
    from quantkit.results.statistics.summary import PolynomialFit

DEFINITIONS = (
    "TTFT: request arrived to first token.\n"
    "ITL: every gap between successive tokens, pooled over requests; shows stalls.\n"
    "TPOT: (last token - first) / (tokens - 1), one per request; averages them out."
)


def model_numbers(
    result: BenchmarkResult, fits: dict[str, PolynomialFit | None], diagnosis: Diagnosis | None
) -> dict[str, Any]:
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
    from quantkit.results.statistics.summary import quantiles

    known = {name: quantiles(values) for name, values in run.latencies.items()}
    return {
        **{f"{name.lower()}_s": value and asdict(value) for name, value in known.items()},
        "tokens_per_s": run.output_tokens_per_s,
        "requests_per_s": run.requests_per_s,
        "goodput_per_s": run.goodput_per_s,
    }


def labelled_runs(results: Sequence[BenchmarkResult]) -> list[tuple[str, BenchmarkRun]]:
    """The same run of all models together; the model is named where there are several."""
    suffixes = [f", {short_name(result.model)}" if len(results) > 1 else "" for result in results]
    together = zip(*(result.runs for result in results), strict=True)
    return [(run.workload.name + end, run) for runs in together for run, end in zip(runs, suffixes, strict=True)]


def explained_latency_table(runs: Sequence[tuple[str, BenchmarkRun]]) -> Table | None:
    """The report's table, with what its words mean."""
    from quantkit.report.speed_tables import latency_table

    table = latency_table(runs)
    return table and replace(table, note=f"{DEFINITIONS}\n{table.note}")


def ratio_table(ratios: Sequence[Ratio], baseline: str) -> Table:
    """The model over the other, with the noise of the rounds."""
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
        note="Medians, measured in turns (A B B A ...); a ratio of latencies below 1 is faster. Rounds: smallest and "
        "largest ratio of a round. Noise: half the spread of a model's own rounds.",
    )


def fit_lines(fits: dict[str, PolynomialFit | None]) -> str:
    """Both fits as formulas with their standard errors."""
    lines = [_fit_line(name, variable, fits[name]) for name, variable in (("ITL", "c"), ("TTFT", "p"))]
    return "\n".join([*lines, "c: context, p: prompt, in 1,000 tokens; batch 1; standard errors in brackets"])


def _fit_line(name: str, variable: str, fit: PolynomialFit | None) -> str:
    if fit is None:
        return f"{name} fit: too few different lengths"
    text = name
    for power, (value, error) in enumerate(zip(fit.coefficients, fit.standard_errors, strict=True)):
        # Seconds to milliseconds, and each power of tokens to thousands.
        scale = 1000 * 1000**power
        sign = "=" if power == 0 else "-" if value < 0 else "+"
        size = value if power == 0 else abs(value)
        factor = ("", f" {variable}", f" {variable}^2")[power]
        text += f" {sign} {scale * size:.3g} (+/- {scale * error:.2g}) ms{factor}"
    dropped = f", {fit.num_dropped} stall{'s' * (fit.num_dropped > 1)} left out" if fit.num_dropped else ""
    return f"{text}; {fit.num_points} points{dropped}"


def short_name(model: str) -> str:
    """The last part of a path or hub id, for columns."""
    return model.rstrip("/").rpartition("/")[2] or model


def settings_lines(results: Sequence[BenchmarkResult]) -> str:
    """Where and how each model ran."""
    names, lines = ("engine", "computed in", "threads", "linears", "KV budget", "speculation", "notes"), []
    for result in results:
        settings = [f"{name} {result.settings[name]}" for name in names if name in result.settings]
        lines.append(f"{result.model} on {result.device}; KV cache {result.kv_cache}; {'; '.join(settings)}")
    return "\n".join(lines)


def diagnosis_table(diagnosis: Diagnosis) -> RichTable:
    """Findings with their evidence, what to try, and what that should bring."""
    # One cell holds sentences of different style, which a neutral table does not know.
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Diagnosis", title_justify="left", title_style="bold", show_header=False, box=None)
    for position, finding in enumerate(diagnosis.findings, start=1):
        text = Text(finding.statement).append(f"\n{finding.evidence}", style="dim")
        if finding.advice:
            text.append(f"\nTry: {finding.advice}")
        if finding.expected_gain:
            # chr(10), since Python before 3.12 allows no backslash in the braces of an f-string.
            text.append(f"{' ' if finding.advice else chr(10)}Expected: {finding.expected_gain}.")
        table.add_row(f"{position}.", text)
    return table


def cache_numbers(comparison: CacheComparison) -> dict[str, Any]:
    """Both ways' timestamps, and the ratio at some numbers of tokens."""
    return {
        "cached": comparison.cached.to_dict(),
        "recomputed": comparison.recomputed.to_dict(),
        "num_same_tokens": comparison.num_same,
        "marks": [mark._asdict() for mark in comparison.marks()],
    }


def cache_table(comparison: CacheComparison) -> Table:
    """What the KV cache saves, by number of generated tokens."""
    count = comparison.cached.num_new_tokens
    same = "the same tokens both ways"
    if comparison.num_same < count:
        same = f"the first {comparison.num_same} tokens are the same both ways, then rounding decided a close call"
    return Table(
        columns=(
            *(Column("new tokens", "{:,}".format), Column("with cache", duration), Column("recomputed", duration)),
            Column("ratio", "{:.1f}x".format),
        ),
        rows=tuple(comparison.marks()),
        note=f"Time until so many tokens were there, prompt of {comparison.cached.prompt_tokens}; {same}.",
    )
