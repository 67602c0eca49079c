"""Several checkpoints in one comparison: size, accuracy and speed of each, and which of them no other beats.

A checkpoint is on the front when no other is at least as good in size, quality and speed and better in one of them. The
originals take part: a compressed model that is no smaller, no faster and worse is no choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.errors import ReportError
from quantkit.report.html import render_page
from quantkit.report.plots import pareto_plot
from quantkit.report.sections import Section
from quantkit.report.tables import Table
from quantkit.report.words import MISSING, byte_size, duration, number, percent, recovery_text
from quantkit.results import Report
from quantkit.results.gates import measure
from quantkit.results.statistics import ALL_TASKS, median_interval

QUALITIES = (("recovery", "recovery, %", True), ("perplexity_ratio", "perplexity ratio", False), ("kl", "KL", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One checkpoint in the comparison.

    Args:
        name: unique among the entries.
        num_bytes: on disk; None when unknown.
        bits_per_weight: of quantized linears.
        quality: the number all entries have, see `CheckpointComparison.quality`.
        recovery_text: recovery with its interval.
        perplexity_ratio, kl: to the original; None when not measured.
        itl_s, ttft_s: medians of the first shared workload; None when not measured.
        held: whether its gates held; None without gates.
        on_front: whether no other entry beats it.
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
    held: bool | None
    on_front: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointComparison:
    """Entries in the order of size, and how they were ranked.

    Args:
        entries: smallest first.
        quality: name of the number on the quality axis: "recovery", "perplexity_ratio" or "kl".
        quality_label: with its unit.
        higher_is_better: direction of the quality.
        workload: whose latencies are compared; empty when none is shared.
        warnings: why entries may not be comparable.
    """

    entries: tuple[Entry, ...]
    quality: str
    quality_label: str
    higher_is_better: bool
    workload: str
    warnings: tuple[str, ...]


def compare_reports(reports: Sequence[Report]) -> CheckpointComparison:
    """Put checkpoints side by side, their originals included.

    Args:
        reports: at least two.
    Raises:
        ReportError: fewer than two.
    """
    if len(reports) < 2:
        raise ReportError(f"a comparison needs two reports or more, found {len(reports)}")
    metrics = [measure(report) for report in reports]
    quality, label, higher = next(
        (choice for choice in QUALITIES if all(choice[0] in found for found in metrics)), QUALITIES[0]
    )
    workload = _shared_workload(reports)
    names = _unique_names([report.model.name for report in reports])
    entries = [
        _entry(report, found, name, quality, workload)
        for report, found, name in zip(reports, metrics, names, strict=True)
    ]
    entries += _originals(reports, quality, workload)
    ranked = [_rank(entry, entries, higher) for entry in sorted(entries, key=lambda e: (e.num_bytes or 0, e.name))]
    return CheckpointComparison(
        entries=tuple(ranked),
        quality=quality,
        quality_label=label,
        higher_is_better=higher,
        workload=workload,
        warnings=tuple(_warnings(reports)),
    )


def front(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Which points no other dominates, where less is better in every coordinate."""
    return [
        not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def comparison_table(found: CheckpointComparison) -> Table:
    """The comparison as rows of text."""
    columns = ("", "size", "bits", "recovery (95 %)", "perplexity", "KL", "ITL", "TTFT", "gates", "front")
    rows = tuple(
        (
            f"{place} {entry.name}",
            byte_size(entry.num_bytes),
            number(entry.bits_per_weight),
            entry.recovery_text,
            MISSING if entry.perplexity_ratio is None else f"{number(entry.perplexity_ratio, 4)}x",
            number(entry.kl),
            duration(entry.itl_s),
            duration(entry.ttft_s),
            {None: MISSING, True: "held", False: "failed"}[entry.held],
            "yes" if entry.on_front else "",
        )
        for place, entry in enumerate(found.entries, 1)
    )
    note = f"ITL and TTFT are medians of {found.workload}." if found.workload else ""
    return Table(caption="Checkpoints, smallest first", columns=columns, rows=rows, note=note)


def comparison_sentence(found: CheckpointComparison) -> str:
    """Which entries are worth choosing, in one sentence."""
    chosen = [entry.name for entry in found.entries if entry.on_front]
    return f"{len(chosen)} of {len(found.entries)} are beaten by no other: {', '.join(chosen)}."


def render_comparison(found: CheckpointComparison) -> str:
    """The comparison as a page.

    Raises:
        ReportError: matplotlib or jinja2 is not installed.
    """
    drawn = [
        plot
        for plot in (
            _plot(found, "by-size", "size, MiB", lambda e: e.num_bytes and e.num_bytes / 2**20),
            _plot(found, "by-speed", "ITL, ms", lambda e: e.itl_s and 1e3 * e.itl_s),
        )
        if plot is not None
    ]
    meaning = "A checkpoint is on the front when no other is as good in size, quality and speed and better in one."
    text = [
        *found.warnings,
        meaning,
        "Numbers in the plots are those of the table; each plot joins the front of its two axes.",
    ]
    return render_page(
        title="Checkpoints compared",
        subtitle=", ".join(entry.name for entry in found.entries),
        verdict=comparison_sentence(found),
        held=None,
        sections=[
            Section(
                name="comparison",
                title="Size, quality, speed",
                text=text,
                figures=drawn,
                tables=[comparison_table(found)],
            )
        ],
    )


def _plot(found: CheckpointComparison, name: str, x_label: str, cost: Callable[[Entry], float | None]) -> str | None:
    """Quality against one cost, with the front of these two."""
    known = [
        (place, entry.name, float(x), entry.quality)
        for place, entry in enumerate(found.entries, 1)
        if (x := cost(entry)) is not None and entry.quality is not None
    ]
    best = front([(x, -y if found.higher_is_better else y) for _, _, x, y in known])
    points = [(*point, chosen) for point, chosen in zip(known, best, strict=True)]
    return pareto_plot(name, points, x_label=x_label, y_label=found.quality_label, higher=found.higher_is_better)


def _entry(report: Report, found: dict[str, float], name: str, quality: str, workload: str) -> Entry:
    benchmark = report.benchmark.find_run(workload) if report.benchmark else None
    return Entry(
        name=name,
        num_bytes=report.model.num_bytes or None,
        bits_per_weight=report.model.bits_per_weight,
        quality=found.get(quality),
        recovery_text=recovery_text(report.find_comparison(ALL_TASKS)),
        perplexity_ratio=found.get("perplexity_ratio"),
        kl=found.get("kl"),
        itl_s=_median(benchmark.inter_token_s if benchmark else ()),
        ttft_s=_median(benchmark.ttft_s if benchmark else ()),
        held=report.held if report.gates else None,
        on_front=False,
    )


def _originals(reports: Sequence[Report], quality: str, workload: str) -> list[Entry]:
    """One entry for each original, measured in the first report that has it."""
    found: dict[str, Entry] = {}
    for report in reports:
        original = report.baseline_model
        if original is None or original.name in found:
            continue
        benchmark = report.baseline_benchmark.find_run(workload) if report.baseline_benchmark else None
        found[original.name] = Entry(
            name=original.name,
            num_bytes=original.num_bytes or None,
            bits_per_weight=None,
            quality={"recovery": 100.0, "perplexity_ratio": 1.0}.get(quality, 0.0),
            recovery_text=percent(100.0),
            perplexity_ratio=1.0,
            kl=0.0,
            itl_s=_median(benchmark.inter_token_s if benchmark else ()),
            ttft_s=_median(benchmark.ttft_s if benchmark else ()),
            held=None,
            on_front=False,
        )
    return list(found.values())


def _rank(entry: Entry, entries: Sequence[Entry], higher: bool) -> Entry:
    """The entry, knowing whether it is on the front of those that have the same numbers."""
    timed = all(e.itl_s is not None for e in entries)

    def costs(e: Entry) -> tuple[float, ...] | None:
        if e.num_bytes is None or e.quality is None:
            return None
        return (float(e.num_bytes), -e.quality if higher else e.quality, *([e.itl_s or 0.0] if timed else []))

    points = [point for e in entries if (point := costs(e)) is not None]
    mine = costs(entry)
    return dataclasses.replace(entry, on_front=mine is not None and front(points)[points.index(mine)])


def _median(values: Sequence[float]) -> float | None:
    return median_interval(values)[0] if values else None


def _shared_workload(reports: Sequence[Report]) -> str:
    """The first workload that every report has; empty when there is none."""
    first = reports[0].benchmark
    names = [run.workload.name for run in first.runs] if first else []
    shared = (n for n in names if all(r.benchmark is not None and r.benchmark.find_run(n) for r in reports))
    return next(shared, "")


def _unique_names(names: Sequence[str]) -> list[str]:
    """Names that repeat get a number."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def _warnings(reports: Sequence[Report]) -> list[str]:
    """Why the numbers may not be comparable, one sentence each."""
    found = []
    originals = {report.baseline_model.name for report in reports if report.baseline_model}
    if len(originals) > 1:
        found.append(f"The checkpoints have different originals: {', '.join(sorted(originals))}.")
    tasks = {tuple(sorted(c.subject for c in report.comparisons)) for report in reports}
    if len(tasks) > 1:
        found.append("The checkpoints were not asked the same tasks, so their mean recovery is not of the same thing.")
    machines = {(report.environment.cpu, report.environment.device) for report in reports}
    if len(machines) > 1:
        found.append("The checkpoints were timed on different machines, so their latencies cannot be compared.")
    if any(report.baseline_model is None for report in reports):
        found.append("A report has no original beside it, so it has no recovery.")
    return found
