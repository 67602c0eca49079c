"""Compare size, accuracy and speed of several checkpoints, and find the Pareto front.

A checkpoint is on the front if no other checkpoint is at least as good in size, quality and speed, and better in one of
these. The originals are compared too.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import ReportError
from quantkit.quantities import byte_size, duration, number, percent
from quantkit.report.page import PageSection, render_page
from quantkit.report.plots import pareto_plot
from quantkit.report.table import Column, Table
from quantkit.report.tables import recovery_text
from quantkit.results import BenchmarkResult, ModelFacts, Report
from quantkit.results.gates import gate_numbers
from quantkit.results.statistics.comparison import ALL_TASKS
from quantkit.results.statistics.summary import median

QUALITIES = (("recovery", "recovery, %", True), ("perplexity_ratio", "perplexity ratio", False), ("kl", "KL", False))
_PERPLEXITY = Column("perplexity", lambda ratio: f"{number(ratio, 4)}x", detail=True)
_OF_AN_ORIGINAL = {"recovery": 100.0, "perplexity_ratio": 1.0, "kl": 0.0}  # of an original, compared with itself


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedCheckpoint:
    """Size, quality and speed of one checkpoint in a comparison.

    Args:
        name: name, unique among the entries.
        num_bytes: bytes on disk; None if unknown.
        bits_per_weight: average over the quantized linears; None for an original.
        quality: value of the compared quality metric, see `CheckpointComparison.quality`; None if not measured.
        recovery_text: recovery with its interval, as text.
        perplexity_ratio, kl: perplexity ratio and KL to the original; None if not measured.
        itl_s, ttft_s: median ITL and TTFT in the first workload that all reports have; None if not measured.
        held: whether all gates held; None without gates.
        on_front: whether the checkpoint is on the Pareto front.
    """

    name: str
    num_bytes: int | None
    bits_per_weight: float | None
    quality: float | None
    recovery_text: str
    perplexity_ratio: float | None
    kl: float | None
    itl_s: float | None
    ttft_s: float | None
    held: bool | None = None
    on_front: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointComparison:
    """Compared checkpoints, ordered by size, and the criteria of the comparison.

    Args:
        entries: entries, smallest first.
        quality: name of the quality metric: "recovery", "perplexity_ratio" or "kl".
        quality_label: label of the metric, with its unit.
        higher_is_better: direction of the metric.
        workload: workload whose latencies are compared; empty if no workload is shared.
        warnings: reasons why entries may not be comparable.
    """

    entries: tuple[ComparedCheckpoint, ...]
    quality: str
    quality_label: str
    higher_is_better: bool
    workload: str
    warnings: tuple[str, ...]


def compare_reports(reports: Sequence[Report]) -> CheckpointComparison:
    """Compare the checkpoints that reports describe, and their originals.

    Args:
        reports: at least two reports, or one report with an original.
    Raises:
        ReportError: there is only one checkpoint, or none.
    """
    if len(reports) < 2 and not any(report.baseline_model for report in reports):
        raise ReportError(
            f"a comparison needs at least two reports, or one report that includes its original; found {len(reports)}"
        )
    metrics = [gate_numbers(report) for report in reports]
    # The first metric that all reports have, because entries with different metrics cannot be ranked.
    quality, label, higher = next((q for q in QUALITIES if all(q[0] in values for values in metrics)), QUALITIES[0])
    workload = _shared_workload(reports)

    def entry(
        name: str, model: ModelFacts, numbers: Mapping[str, float], benchmark: BenchmarkResult | None, **others: Any
    ) -> ComparedCheckpoint:
        run = benchmark.find_run(workload) if benchmark else None
        return ComparedCheckpoint(
            name=name,
            num_bytes=model.num_bytes or None,
            bits_per_weight=model.bits_per_weight,
            quality=numbers.get(quality),
            perplexity_ratio=numbers.get("perplexity_ratio"),
            kl=numbers.get("kl"),
            itl_s=median(run.inter_token_s) if run else None,
            ttft_s=median(run.ttft_s) if run else None,
            **others,
        )

    entries = []
    for report, numbers, name in zip(reports, metrics, _unique_names([r.model.name for r in reports]), strict=True):
        recovery, held = recovery_text(report.find_comparison(ALL_TASKS)), report.held if report.gates else None
        entries.append(entry(name, report.model, numbers, report.benchmark, recovery_text=recovery, held=held))
    # Each original once, as it was measured in the first report that has it.
    beside = [(report.baseline_model, report.baseline_benchmark) for report in reversed(reports)]
    for original, benchmark in {model.name: (model, benchmark) for model, benchmark in beside if model}.values():
        entries.append(entry(original.name, original, _OF_AN_ORIGINAL, benchmark, recovery_text=percent(100.0)))
    entries = _ranked(sorted(entries, key=lambda e: (e.num_bytes or 0, e.name)), higher)
    return CheckpointComparison(
        entries=tuple(entries),
        quality=quality,
        quality_label=label,
        higher_is_better=higher,
        workload=workload,
        warnings=tuple(_warnings(reports)),
    )


def front(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return, for each point, whether it is on the Pareto front: no other point is at least as good in every coordinate
    and better in one. Less is better.
    """
    return [
        # Equal points do not dominate each other, so they are all on the front.
        not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def checkpoints_table(comparison: CheckpointComparison) -> Table:
    """Create the table of a comparison, with one row per checkpoint."""
    return Table(
        title="Checkpoints, smallest first",
        columns=(
            *(Column(), Column("size", byte_size), Column("bits", number), Column("recovery (95 % interval)", str)),
            *(_PERPLEXITY, Column("KL", number, detail=True), Column("ITL", duration)),
            *(Column("TTFT", duration, detail=True), Column("gates"), Column("front")),
        ),
        rows=tuple(
            (
                *(f"{position} {entry.name}", entry.num_bytes, entry.bits_per_weight, entry.recovery_text),
                *(entry.perplexity_ratio, entry.kl, entry.itl_s, entry.ttft_s),
                {None: None, True: "held", False: "failed"}[entry.held],
                "yes" if entry.on_front else "",
            )
            for position, entry in enumerate(comparison.entries, 1)
        ),
        note=f"ITL and TTFT are medians of {comparison.workload}." if comparison.workload else "",
    )


def comparison_sentence(comparison: CheckpointComparison) -> str:
    """Return one sentence that names the checkpoints on the Pareto front."""
    chosen = [entry.name for entry in comparison.entries if entry.on_front]
    return f"On the Pareto front ({len(chosen)} of {len(comparison.entries)}): {', '.join(chosen)}."


def render_comparisons(comparisons: Mapping[str, CheckpointComparison], remarks: Sequence[str] = ()) -> str:
    """Render comparisons as an HTML page.

    Args:
        comparisons: comparisons, keyed by the heading of their section.
        remarks: sentences at the top of the first section.
    Raises:
        ReportError: matplotlib or jinja2 is not installed.
    """
    sections = [
        _page_section(f"-{number}" if number else "", title, comparison, () if number else remarks)
        for number, (title, comparison) in enumerate(comparisons.items())
    ]
    named = len(comparisons) > 1
    return render_page(
        title="Checkpoints compared",
        subtitle=", ".join(entry.name for comparison in comparisons.values() for entry in comparison.entries),
        verdict=" ".join(
            f"{title}: {comparison_sentence(comparison)}" if named else comparison_sentence(comparison)
            for title, comparison in comparisons.items()
        ),
        sections=sections,
    )


def _page_section(end: str, title: str, comparison: CheckpointComparison, remarks: Sequence[str]) -> PageSection:
    """Create the section of one comparison; the suffix `end` makes the section's ids unique on the page."""
    drawn = [
        _plot(comparison, f"by-size{end}", "size, MiB", lambda e: e.num_bytes and e.num_bytes / 2**20),
        _plot(comparison, f"by-speed{end}", "ITL, ms", lambda e: e.itl_s and 1e3 * e.itl_s),
    ]
    return PageSection(
        name=f"comparison{end}",
        title=title,
        text=[
            *remarks,
            *comparison.warnings,
            (
                "A checkpoint is on the front if no other checkpoint is at least as good in size, quality and speed, "
                "and better in one of these."
            ),
            "The plots show the numbers of the table. Each plot draws the front for the two quantities on its axes.",
        ],
        figures=[figure for figure in drawn if figure is not None],
        tables=[checkpoints_table(comparison)],
    )


def _plot(
    comparison: CheckpointComparison, name: str, x_label: str, cost: Callable[[ComparedCheckpoint], float | None]
) -> str | None:
    """Plot quality against one cost, with the Pareto front of these two; None if no entry has both."""
    known = [
        (position, entry.name, float(x), entry.quality)
        for position, entry in enumerate(comparison.entries, 1)
        if (x := cost(entry)) is not None and entry.quality is not None
    ]
    higher = comparison.higher_is_better
    # Dominance is defined for costs, so the sign of the quality is flipped if higher is better.
    best = front([(x, -y if higher else y) for _, _, x, y in known])
    points = [(*point, chosen) for point, chosen in zip(known, best, strict=True)]
    return pareto_plot(name, points, x_label=x_label, y_label=comparison.quality_label, higher=higher)


def _ranked(entries: Sequence[ComparedCheckpoint], higher: bool) -> list[ComparedCheckpoint]:
    """Return copies of the entries with `on_front` filled in. Entries without size or quality are not on the front."""
    # Speed counts only if every entry was timed; otherwise an entry without times would win or lose by default.
    timed = all(e.itl_s is not None for e in entries)
    costs = {
        e: (float(e.num_bytes), -e.quality if higher else e.quality, *([e.itl_s or 0.0] if timed else []))
        for e in entries
        if e.num_bytes is not None and e.quality is not None
    }
    best = dict(zip(costs, front(list(costs.values())), strict=True))
    return [dataclasses.replace(entry, on_front=best.get(entry, False)) for entry in entries]


def _shared_workload(reports: Sequence[Report]) -> str:
    """Return the first workload that every report has; empty if there is none."""
    names = (run.workload.name for run, _ in reports[0].paired_runs)
    return next((name for name in names if all(r.benchmark and r.benchmark.find_run(name) for r in reports)), "")


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to each name that occurs several times."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def _warnings(reports: Sequence[Report]) -> list[str]:
    """Return the reasons why the numbers may not be comparable, one sentence each."""
    originals = sorted({report.baseline_model.name for report in reports if report.baseline_model})
    tasks = {tuple(sorted(c.subject for c in report.comparisons)) for report in reports}
    machines = {(report.environment.cpu, report.environment.device) for report in reports}
    warnings = (
        (len(originals) > 1, f"The checkpoints have different originals: {', '.join(originals)}."),
        (
            len(tasks) > 1,
            "The checkpoints were evaluated on different tasks, so their mean recoveries are not comparable.",
        ),
        (len(machines) > 1, "The checkpoints were timed on different machines, so their latencies are not comparable."),
        (any(not r.baseline_model for r in reports), "A report does not include its original, so it has no recovery."),
    )
    return [sentence for holds, sentence in warnings if holds]
