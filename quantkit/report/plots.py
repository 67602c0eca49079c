"""Plots of a report. Each function converts records to an `<svg>` element, or returns None if there is nothing
to plot.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from quantkit.quantities import byte_size, number, percent
from quantkit.report.speed_tables import LATENCIES
from quantkit.report.svg import BAD, HEAT, INK, LINE, MODEL, MUTED, ORIGINAL, new_figure, to_svg
from quantkit.results import BenchmarkResult, BenchmarkRun, Report, RooflineRecord, SensitivityMap
from quantkit.results.statistics.comparison import ANSWER_LENGTH, BEHAVIOUR
from quantkit.results.statistics.summary import fit_gaps, percentile

LEGEND: dict[str, Any] = {"loc": "outside upper left", "ncols": 3, "handlelength": 1.6, "columnspacing": 1.4}
CONTEXT_BINS = 12

Style = tuple[str, str, str]  # colour, dash and mark: original and model differ in all three, not in colour alone
STYLES: tuple[Style, Style] = (ORIGINAL, "--", "s"), (MODEL, "-", "o")


def accuracy_plot(report: Report) -> str | None:
    """Plot the recovery of each task and text with its 95 % interval, and lines at 100 % and at the gate's limit."""
    rows = [
        c for c in report.comparisons if c.recovery is not None and not c.subject.startswith((ANSWER_LENGTH, BEHAVIOUR))
    ]
    if not rows:
        return None
    with new_figure(5.2, 0.9 + 0.36 * len(rows)) as (figure, axes):
        axes.axvline(100, color=MUTED, linewidth=1.2)
        gates = [g for g in report.gates if g.metric == "recovery" and g.subject is None]
        for gate in gates[:1]:
            axes.axvline(gate.limit, color=BAD, linewidth=1.2, linestyle=":", label=f"gate {gate.limit:g} %")
        for position, row in enumerate(rows):
            if row.recovery_low is not None and row.recovery_high is not None:
                axes.plot([row.recovery_low, row.recovery_high], [position, position], color=MODEL, linewidth=2.4)
            axes.plot([row.recovery], [position], "o", color=MODEL, markersize=6.5)
        # An empty line for the legend, because interval and point are drawn separately in every row.
        axes.plot([], [], "o-", color=MODEL, linewidth=2.4, label="model, 95 % interval")
        axes.set_yticks(range(len(rows)), [_short(row.subject) for row in rows])
        axes.grid(axis="y", visible=False)
        # Upside down, so that the first row of the table is the topmost of the plot.
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="per cent of the original")
        figure.legend(**LEGEND)
        spoken = "; ".join(f"{row.subject} {percent(row.recovery)}" for row in rows)
        return to_svg(figure, "accuracy", "Recovery with 95 % intervals", f"Per cent of the original: {spoken}.")


def sensitivity_plot(sensitivity: SensitivityMap) -> str:
    """Draw a heat map of KL on a logarithmic scale: one row per fused group, one column per layer."""
    groups = list(dict.fromkeys(record.group for record in sensitivity.records))
    layers = max(record.layer for record in sensitivity.records) + 1
    edges = heat_edges([record.kl for record in sensitivity.records])
    with new_figure(5.2, 1.35 + 0.34 * len(groups)) as (figure, axes):
        from matplotlib.patches import Patch, Rectangle

        for record in sensitivity.records:
            # Rectangles, not an image: only vectors can take the colours of the page's theme.
            corner = (record.layer - 0.5, groups.index(record.group) - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=HEAT[bisect_left(edges, record.kl)], edgecolor="none"))
        axes.set(xlim=(-0.5, layers - 0.5), ylim=(len(groups) - 0.5, -0.5), xlabel="decoder layer")
        axes.set_yticks(range(len(groups)), [_short(group) for group in groups])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False)
        patches = [Patch(facecolor=HEAT[i], edgecolor=LINE, label=text) for i, text in enumerate(heat_labels(edges))]
        figure.legend(handles=patches, **{**LEGEND, "handlelength": 1.2})
        worst = "; ".join(f"layer {r.layer} {r.group} {number(r.kl)}" for r in sensitivity.worst(5))
        text = f"KL divergence with one fused group quantized, {layers} layers by {len(groups)} groups. Worst: {worst}."
        return to_svg(figure, "sensitivity", "Sensitivity by layer and fused group", text)


def heat_edges(values: Sequence[float]) -> list[float]:
    """Return the five limits between the six shades of the heat map.

    The first limit is the lower quartile of the values. Each limit is the same factor above the one before, and this
    factor above the last limit is the maximum.
    """
    ordered = sorted(max(value, 1e-12) for value in values)
    low, high = percentile(ordered, 25), max(ordered[-1], 1e-12)
    # Equal values would give equal edges, and so repeated labels.
    high = max(high, 2 * low)
    steps = len(HEAT) - 1
    return [low * (high / low) ** (i / steps) for i in range(steps)]


def heat_labels(edges: Sequence[float]) -> list[str]:
    """Return the label of each shade: its upper limit, and for the last shade its lower limit."""
    texts = [number(edge, 2) for edge in edges]
    return [*(f"to {text}" for text in texts), f"over {texts[-1]}"]


def latency_plot(report: Report, quantity: str) -> str | None:
    """Plot the cumulative distribution of a latency for both models in the first workload: TTFT over requests, or ITL
    over gaps between tokens.

    Args:
        report: report with the measurements.
        quantity: "TTFT" or "ITL".
    """
    meaning, runs = LATENCIES[quantity][0], _first_runs(report)
    sides = [(label, sorted(times), style) for label, run, style in runs if (times := run.latencies[quantity])]
    if not sides:
        return None
    with new_figure(5.2, 3.0) as (figure, axes):
        for label, values, (colour, dash, _) in sides:
            # At most 201 points: more points would make the page larger but the curve no sharper.
            kept = values if len(values) < 200 else [percentile(values, p / 2) for p in range(201)]
            share = [100 * (i + 1) / len(kept) for i in range(len(kept))]
            axes.step([1000 * v for v in kept], share, where="post", color=colour, linestyle=dash, label=label, lw=2)
        # A stall would squeeze everything else to the left, so the axis ends a little beyond the 99th percentile.
        axes.set(xlim=(0, 1080 * max(percentile(values, 99) for _, values, _ in sides)), ylim=(0, 102))
        axes.set(xlabel=f"{meaning}, ms", ylabel="% up to this latency")
        figure.legend(**LEGEND)
        spoken = "; ".join(
            f"{label}: half within {number(1000 * percentile(values, 50))} ms, 99 % within "
            f"{number(1000 * percentile(values, 99))} ms"
            for label, values, _ in sides
        )
        return to_svg(figure, quantity.lower(), f"Distribution of {meaning}", f"{spoken}.")


def context_plot(report: Report) -> str | None:
    """Plot the median ITL by context length, and a line fitted to all gaps, for both models in the first workload."""
    sides = [
        (label, run.context_gaps, line, style)
        for label, run, style in _first_runs(report)
        if (line := fit_gaps(run)) is not None
    ]
    if not sides:
        return None
    with new_figure(5.2, 3.0) as (figure, axes):
        for label, points, line, (colour, dash, mark) in sides:
            centres = _bin_medians(points)
            axes.plot([c for c, _ in centres], [1000 * g for _, g in centres], mark, color=colour, markersize=5)
            ends = [min(points)[0], max(points)[0]]
            axes.plot(ends, [1000 * line.at(x) for x in ends], dash, color=colour, label=label, lw=2)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="context, tokens", ylabel="ITL, ms")
        figure.legend(**LEGEND)
        spoken = "; ".join(
            f"{label}: {number(1e3 * line.coefficients[0])} ms + {number(1e6 * line.coefficients[1])} ms per 1,000"
            for label, _, line, _ in sides
        )
        return to_svg(figure, "context", "Inter-token latency against context", f"Fitted lines. {spoken}.")


def memory_plot(report: Report) -> str | None:
    """Plot the bytes of each part of memory: observed for the original, predicted and observed for the model."""
    ours, theirs = report.benchmark, report.baseline_benchmark
    if ours is None or not ours.memory:
        return None
    parts = [record.part for record in ours.memory]
    bars: list[tuple[str, BenchmarkResult, str, tuple[str, str]]] = [
        ("model, predicted", ours, "predicted_bytes", ("none", MODEL)),
        ("model, observed", ours, "observed_bytes", (MODEL, MODEL)),
    ]
    if theirs is not None and theirs.memory:
        bars.insert(0, ("original, observed", theirs, "observed_bytes", (ORIGINAL, ORIGINAL)))
    size, unit = 2**20, "MiB"
    if max(r.observed_bytes or r.predicted_bytes or 0 for r in ours.memory) >= 2**30:
        size, unit = 2**30, "GiB"
    with new_figure(5.2, 0.9 + 0.62 * len(parts)) as (figure, axes):
        height = 0.8 / len(bars)
        for position, (label, benchmark, field, (face, edge)) in enumerate(bars):
            offsets = [i + height * (position - (len(bars) - 1) / 2) for i in range(len(parts))]
            widths = [(getattr(benchmark.memory_part(part), field, None) or 0) / size for part in parts]
            axes.barh(offsets, widths, height * 0.86, label=label, linewidth=1.4, facecolor=face, edgecolor=edge)
        axes.set_yticks(range(len(parts)), [_short(part) for part in parts])
        axes.grid(axis="y", visible=False)
        axes.set(ylim=(len(parts) - 0.45, -0.55), xlabel=unit)
        figure.legend(**{**LEGEND, "ncols": 2})
        spoken = "; ".join(
            f"{r.part} {byte_size(r.observed_bytes)} observed, {byte_size(r.predicted_bytes)} predicted"
            for r in ours.memory
        )
        return to_svg(figure, "memory", "Memory, predicted and observed", f"Of the model: {spoken}.")


def roofline_plot(report: Report) -> str | None:
    """Plot operations per second against operations per byte for the steps of both models, and the ceilings that were
    measured in the same run.
    """
    benchmarks = zip(("original", "model"), (report.baseline_benchmark, report.benchmark), STYLES, strict=True)
    sides = [(label, side.roofline, style) for label, side, style in benchmarks if side and side.roofline]
    if not sides:
        return None
    shown, records = sides[-1], [record for _, steps, _ in sides for record in steps]
    with new_figure(5.2, 3.6) as (figure, axes):
        _draw_ceiling(axes, records)
        for label, steps, (colour, _, mark) in sides:
            rates = [record.flops / record.seconds for record in steps]
            hollow = {"markerfacecolor": "none"} if label == "original" else {}
            intensities = [record.intensity for record in steps]
            axes.plot(intensities, rates, mark, color=colour, label=label, markersize=7, markeredgewidth=1.6, **hollow)
        for position, record in enumerate(shown[1]):  # at alternating heights, because points may lie close together
            text = f"{record.phase} {record.batch if record.phase == 'decode' else record.num_tokens}"
            spot, offset = (record.intensity, record.flops / record.seconds), (0, -16 - 12 * (position % 2))
            axes.annotate(text, spot, xytext=offset, textcoords="offset points", fontsize=10, color=INK, ha="center")
        _log_axes(axes)
        axes.set(xlabel="operations per byte moved", ylabel="operations per second")
        figure.legend(**LEGEND)
        spoken = "; ".join(
            f"{r.phase} of {r.num_tokens} tokens: {r.shown_share(r.mbu)} of the memory bandwidth, "
            f"{r.shown_share(r.mfu)} of the matrix-product rate"
            for r in shown[1]
        )
        return to_svg(figure, "roofline", "Roofline", f"The {shown[0]}: {spoken}.")


Point = tuple[int, str, float, float, bool]  # number in the table, name, cost, quality, whether on the front


def pareto_plot(name: str, points: Sequence[Point], *, x_label: str, y_label: str, higher: bool = True) -> str | None:
    """Plot checkpoints by cost (less is better) and quality; a stepped line joins those on the front.

    Args:
        name: one word, unique on the page.
        points: checkpoints; each is labelled with its number.
        x_label, y_label: labels of the axes, with units.
        higher: whether higher quality values are better.
    """
    if not points:
        return None
    with new_figure(5.2, 3.4) as (figure, axes):
        front = sorted((x, y) for _, _, x, y, best in points if best)
        # Steps, not straight lines, because there is no checkpoint between two points.
        axes.step([x for x, _ in front], [y for _, y in front], where="post", color=MUTED, linestyle=":", lw=1.6)
        for _, _, x, y, best in points:
            axes.plot([x], [y], "o", color=MODEL if best else MUTED, markersize=8 if best else 6)
        for text, x, y in grouped_labels(points):
            axes.annotate(text, (x, y), xytext=(7, 5), textcoords="offset points", fontsize=11, color=INK)
        axes.margins(x=0.12, y=0.15)
        axes.set(xlabel=x_label, ylabel=y_label)
        spoken = "; ".join(
            f"{position} {label}: {number(x)}, {number(y)}{', on the front' if best else ''}"
            for position, label, x, y, best in points
        )
        side = "up and to the left" if higher else "down and to the left"
        return to_svg(figure, name, f"{y_label} against {x_label}", f"Better is {side}. {spoken}.")


def grouped_labels(points: Sequence[Point]) -> list[tuple[str, float, float]]:
    """Return (numbers, x, y) for each label; points that are too close to be distinguished share one label."""
    width = max(p[2] for p in points) - min(p[2] for p in points) or 1.0
    height = max(p[3] for p in points) - min(p[3] for p in points) or 1.0
    groups: list[tuple[list[str], float, float]] = []
    for position, _, x, y, _ in points:
        near = (g for g in groups if abs(g[1] - x) < 0.05 * width and abs(g[2] - y) < 0.05 * height)
        group = next(near, None)
        if group is None:
            groups.append(([str(position)], x, y))
        else:
            group[0].append(str(position))
    return [(", ".join(numbers), x, y) for numbers, x, y in groups]


def _first_runs(report: Report) -> list[tuple[str, BenchmarkRun, Style]]:
    """Return (label, run, style) for the model's first workload: the original's run, if there is one, then the model's
    run, which is drawn on top.
    """
    runs = [(("original", other, STYLES[0]), ("model", run, STYLES[1])) for run, other in report.paired_runs[:1]]
    return [(label, run, style) for sides in runs for label, run, style in sides if run is not None]


def _bin_medians(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return (median context length, median gap) for each of a dozen ranges of context length."""
    low, high = min(p[0] for p in points), max(p[0] for p in points)
    width = max(1.0, (high - low + 1) / CONTEXT_BINS)
    bins: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        bins.setdefault(int((point[0] - low) / width), []).append(point)
    return [
        (percentile([c for c, _ in members], 50), percentile([g for _, g in members], 50))
        for _, members in sorted(bins.items())
    ]


def _draw_ceiling(axes: Any, records: Sequence[RooflineRecord]) -> None:
    copy, gemm = max(r.copy_bytes_per_s for r in records), max(r.gemm_flops_per_s for r in records)
    low = min(r.intensity for r in records) / 3
    high = max(max(r.intensity for r in records) * 3, 3 * gemm / copy)
    axes.plot([low, gemm / copy, high], [low * copy, gemm, gemm], color=MUTED, linewidth=1.6, label="measured ceiling")


def _log_axes(axes: Any) -> None:
    """Make both axes logarithmic, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axis.set_minor_locator(NullLocator())


def short_number(value: float) -> str:
    """Format a round number with a metric prefix, e.g. `100 G`, `1 T`."""
    if value <= 0:
        return "0"
    power = min(5, max(0, math.floor(math.log10(value) / 3)))
    return f"{value / 1000**power:g}{['', ' k', ' M', ' G', ' T', ' P'][power]}"


def _short(subject: str, limit: int = 26) -> str:
    text = subject.replace("perplexity: ", "ppl ")
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
