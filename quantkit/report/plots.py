"""The plots of a report, each a function from records to an `<svg>` element, or None where there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.quantities import byte_size, number, percent
from quantkit.report.svg import BAD, HEAT, INK, LINE, MODEL, MUTED, ORIGINAL, drawing, new_figure, to_svg
from quantkit.results import BenchmarkResult, BenchmarkRun, Report, RooflineRecord, SensitivityMap
from quantkit.results.statistics import fit_polynomial, percentile

LEGEND: dict[str, Any] = {"loc": "outside upper left", "ncols": 3, "handlelength": 1.6, "columnspacing": 1.4}
SIDES = (
    (ORIGINAL, "--", "s"),
    (MODEL, "-", "o"),
)  # original and model differ in dash and mark too, not in colour alone
CONTEXT_BINS = 12


def accuracy_plot(report: Report) -> str | None:
    """Recovery of each task and text with its interval, against 100 % and the gate."""
    rows = [c for c in report.comparisons if c.recovery is not None and not c.subject.startswith("answer length")]
    if not rows:
        return None
    with drawing():
        figure, axes = new_figure(5.2, 0.9 + 0.36 * len(rows))
        axes.axvline(100, color=MUTED, linewidth=1.2)
        gates = [g for g in report.gates if g.metric == "recovery" and g.subject is None]
        for gate in gates[:1]:
            axes.axvline(gate.limit, color=BAD, linewidth=1.2, linestyle=":", label=f"gate {gate.limit:g} %")
        for position, row in enumerate(rows):
            if row.recovery_low is not None and row.recovery_high is not None:
                axes.plot([row.recovery_low, row.recovery_high], [position, position], color=MODEL, linewidth=2.4)
            axes.plot([row.recovery], [position], "o", color=MODEL, markersize=6.5)
        axes.plot([], [], "o-", color=MODEL, linewidth=2.4, label="model, 95 % interval")
        axes.set_yticks(range(len(rows)), [_short(row.subject) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("per cent of the original")
        figure.legend(**LEGEND)
        spoken = "; ".join(f"{row.subject} {percent(row.recovery)}" for row in rows)
        return to_svg(figure, "accuracy", "Recovery with 95 % intervals", f"Per cent of the original: {spoken}.")


def sensitivity_plot(sensitivity: SensitivityMap | None) -> str | None:
    """A heat strip: fused groups down, layers across, shade by KL on a logarithmic scale."""
    if sensitivity is None or not sensitivity.records:
        return None
    groups = list(dict.fromkeys(record.group for record in sensitivity.records))
    layers = max(record.layer for record in sensitivity.records) + 1
    edges = heat_edges([record.kl for record in sensitivity.records])
    with drawing():
        from matplotlib.patches import Patch, Rectangle

        figure, axes = new_figure(5.2, 1.35 + 0.34 * len(groups))
        for record in sensitivity.records:
            corner = (record.layer - 0.5, groups.index(record.group) - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=HEAT[heat_step(record.kl, edges)], edgecolor="none"))
        axes.set_xlim(-0.5, layers - 0.5)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_yticks(range(len(groups)), groups)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("decoder layer")
        axes.grid(visible=False)
        patches = [Patch(facecolor=HEAT[i], edgecolor=LINE, label=text) for i, text in enumerate(heat_labels(edges))]
        figure.legend(handles=patches, **{**LEGEND, "handlelength": 1.2})
        worst = "; ".join(f"layer {r.layer} {r.group} {number(r.kl)}" for r in sensitivity.worst(5))
        text = f"KL divergence with one fused group quantized, {layers} layers by {len(groups)} groups. Worst: {worst}."
        return to_svg(figure, "sensitivity", "Sensitivity by layer and fused group", text)


def heat_edges(values: Sequence[float]) -> list[float]:
    """Limits between the six shades, in equal ratios from the lower quartile to the largest."""
    ordered = sorted(max(value, 1e-12) for value in values)
    low, high = percentile(ordered, 25), max(ordered[-1], 1e-12)
    high = max(high, 2 * low)
    steps = len(HEAT) - 1
    return [low * (high / low) ** (i / steps) for i in range(steps)]


def heat_step(value: float, edges: Sequence[float]) -> int:
    """Which shade a value gets, 0 for the lightest."""
    return sum(value > edge for edge in edges)


def heat_labels(edges: Sequence[float]) -> list[str]:
    """What each shade means, its upper limit."""
    texts = [number(edge, 2) for edge in edges]
    return [*(f"to {text}" for text in texts), f"over {texts[-1]}"]


def latency_plot(report: Report, quantity: str) -> str | None:
    """How many requests (TTFT) or gaps (ITL) took at most so long, both models, first workload.

    Args:
        report: what was measured.
        quantity: "ttft" or "itl".
    """
    read: Callable[[BenchmarkRun], tuple[float, ...]] = (
        (lambda run: run.ttft_s) if quantity == "ttft" else (lambda run: run.inter_token_s)
    )
    sides = [(label, values, style) for label, run, style in _first_runs(report) if (values := sorted(read(run)))]
    if not sides:
        return None
    what = "time to first token" if quantity == "ttft" else "inter-token latency"
    with drawing():
        figure, axes = new_figure(5.2, 3.0)
        for label, values, (colour, dash, _) in sides:
            kept = values if len(values) < 200 else [percentile(values, p / 2) for p in range(201)]
            share = [100 * (i + 1) / len(kept) for i in range(len(kept))]
            axes.step([1000 * v for v in kept], share, where="post", color=colour, linestyle=dash, label=label, lw=2)
        axes.set_xlim(0, 1080 * max(percentile(values, 99) for _, values, _ in sides))
        axes.set_ylim(0, 102)
        axes.set_xlabel(f"{what}, ms")
        axes.set_ylabel("% at most so long")
        figure.legend(**LEGEND)
        spoken = "; ".join(
            f"{label}: half within {number(1000 * percentile(values, 50))} ms, 99 % within "
            f"{number(1000 * percentile(values, 99))} ms"
            for label, values, _ in sides
        )
        return to_svg(figure, quantity, f"Distribution of {what}", f"{spoken}.")


def context_plot(report: Report) -> str | None:
    """Medians of ITL by context, and the fitted line, both models, the first workload with one request in flight."""
    sides = []
    for label, run, style in _first_runs(report):
        points = [point for timing in run.requests for point in timing.context_gaps]
        line = fit_polynomial([p[0] for p in points], [p[1] for p in points])
        if line is not None:
            sides.append((label, points, line, style))
    if not sides:
        return None
    with drawing():
        figure, axes = new_figure(5.2, 3.0)
        for label, points, line, (colour, dash, mark) in sides:
            centres = _bin_medians(points)
            axes.plot([c for c, _ in centres], [1000 * g for _, g in centres], mark, color=colour, markersize=5)
            reach = [min(p[0] for p in points), max(p[0] for p in points)]
            axes.plot(reach, [1000 * line.at(x) for x in reach], dash, color=colour, label=label, lw=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("ITL, ms")
        figure.legend(**LEGEND)
        spoken = "; ".join(
            f"{label}: {number(1e3 * line.coefficients[0])} ms + {number(1e6 * line.coefficients[1])} ms per 1,000"
            for label, _, line, _ in sides
        )
        return to_svg(figure, "context", "Inter-token latency against context", f"Fitted lines. {spoken}.")


def memory_plot(report: Report) -> str | None:
    """Bytes by part: original observed, model predicted, model observed."""
    ours, theirs = report.benchmark, report.baseline_benchmark
    if ours is None or not ours.memory:
        return None
    parts = [record.part for record in ours.memory]
    bars: list[tuple[str, Callable[[str], int | None], dict[str, Any]]] = [
        ("model, predicted", lambda p: _bytes(ours, p, "predicted_bytes"), {"facecolor": "none", "edgecolor": MODEL}),
        ("model, observed", lambda p: _bytes(ours, p, "observed_bytes"), {"facecolor": MODEL, "edgecolor": MODEL}),
    ]
    if theirs is not None and theirs.memory:
        fill = {"facecolor": ORIGINAL, "edgecolor": ORIGINAL}
        bars.insert(0, ("original, observed", lambda p: _bytes(theirs, p, "observed_bytes"), fill))
    unit = 2**30 if max(r.observed_bytes or r.predicted_bytes or 0 for r in ours.memory) >= 2**30 else 2**20
    with drawing():
        figure, axes = new_figure(5.2, 0.9 + 0.62 * len(parts))
        height = 0.8 / len(bars)
        for position, (label, read, fill) in enumerate(bars):
            offsets = [i + height * (position - (len(bars) - 1) / 2) for i in range(len(parts))]
            widths = [(read(part) or 0) / unit for part in parts]
            axes.barh(offsets, widths, height * 0.86, label=label, linewidth=1.4, **fill)
        axes.set_yticks(range(len(parts)), parts)
        axes.set_ylim(len(parts) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("GiB" if unit == 2**30 else "MiB")
        figure.legend(**{**LEGEND, "ncols": 2})
        spoken = "; ".join(
            f"{part} {byte_size(bars[-1][1](part))} observed, {byte_size(bars[-2][1](part))} predicted"
            for part in parts
        )
        return to_svg(figure, "memory", "Memory, predicted beside observed", f"Of the model: {spoken}.")


def roofline_plot(report: Report) -> str | None:
    """Steps of both models under the copy and matrix-product ceilings measured in the same run."""
    sides = [
        (label, benchmark.roofline, style)
        for label, benchmark, style in zip(
            ("original", "model"), (report.baseline_benchmark, report.benchmark), SIDES, strict=True
        )
        if benchmark is not None and benchmark.roofline
    ]
    if not sides:
        return None
    records = [record for _, steps, _ in sides for record in steps]
    with drawing():
        figure, axes = new_figure(5.2, 3.6)
        _draw_ceiling(axes, records)
        for label, steps, (colour, _, mark) in sides:
            rates = [record.flops / record.seconds for record in steps]
            hollow = {"markerfacecolor": "none"} if label == "original" else {}
            intensities = [record.intensity for record in steps]
            axes.plot(intensities, rates, mark, color=colour, label=label, markersize=7, markeredgewidth=1.6, **hollow)
        for position, record in enumerate(sides[-1][1]):  # below each other where points lie close
            text = f"{record.phase} {record.batch if record.phase == 'decode' else record.num_tokens}"
            spot, offset = (record.intensity, record.flops / record.seconds), (0, -16 - 12 * (position % 2))
            axes.annotate(text, spot, xytext=offset, textcoords="offset points", fontsize=10, color=INK, ha="center")
        _log_axes(axes)
        axes.set_xlabel("operations per byte moved")
        axes.set_ylabel("operations per second")
        figure.legend(**LEGEND)
        spoken = "; ".join(
            f"{r.phase} of {r.num_tokens} tokens: {r.shown_share(r.mbu)} of copy bandwidth, "
            f"{r.shown_share(r.mfu)} of the matrix-product rate"
            for r in sides[-1][1]
        )
        return to_svg(figure, "roofline", "Roofline", f"The {sides[-1][0]}: {spoken}.")


Point = tuple[int, str, float, float, bool]  # place in the table, name, cost, quality, whether on the front


def pareto_plot(name: str, points: Sequence[Point], *, x_label: str, y_label: str, higher: bool = True) -> str | None:
    """Several checkpoints by cost (less is better) and quality, those on the front joined by steps.

    Args:
        name: unique on the page, a word.
        points: marked by their place.
        x_label, y_label: with units.
        higher: whether more of the quality is better.
    """
    if not points:
        return None
    with drawing():
        figure, axes = new_figure(5.2, 3.4)
        front = sorted((x, y) for _, _, x, y, best in points if best)
        axes.step([x for x, _ in front], [y for _, y in front], where="post", color=MUTED, linestyle=":", lw=1.6)
        for _, _, x, y, best in points:
            axes.plot([x], [y], "o", color=MODEL if best else MUTED, markersize=8 if best else 6)
        for text, x, y in grouped_labels(points):
            axes.annotate(text, (x, y), xytext=(7, 5), textcoords="offset points", fontsize=11, color=INK)
        axes.margins(x=0.12, y=0.15)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        spoken = "; ".join(
            f"{position} {label}: {number(x)}, {number(y)}{', on the front' if best else ''}"
            for position, label, x, y, best in points
        )
        side = "up and to the left" if higher else "down and to the left"
        return to_svg(figure, name, f"{y_label} against {x_label}", f"Better is {side}. {spoken}.")


def grouped_labels(points: Sequence[Point]) -> list[tuple[str, float, float]]:
    """(places, x, y): one label for points too close to be told apart."""
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
    return [(", ".join(places), x, y) for places, x, y in groups]


def _first_runs(report: Report) -> list[tuple[str, BenchmarkRun, tuple[str, str, str]]]:
    """The first workload that both models ran (or the model alone), original first so that the model lies on top."""
    if report.benchmark is None or not report.benchmark.runs:
        return []
    ours = report.benchmark.runs[0]
    theirs = report.baseline_benchmark.find_run(ours.workload.name) if report.baseline_benchmark else None
    sides = [("original", theirs, SIDES[0]), ("model", ours, SIDES[1])]
    return [(label, run, style) for label, run, style in sides if run is not None]


def _bin_medians(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Median gap of a dozen ranges of context."""
    low, high = min(p[0] for p in points), max(p[0] for p in points)
    width = max(1.0, (high - low + 1) / CONTEXT_BINS)
    bins: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        bins.setdefault(int((point[0] - low) / width), []).append(point)
    return [
        (percentile([c for c, _ in members], 50), percentile([g for _, g in members], 50))
        for _, members in sorted(bins.items())
    ]


def _bytes(benchmark: BenchmarkResult, part: str, field: str) -> int | None:
    record = benchmark.memory_part(part)
    value: int | None = None if record is None else getattr(record, field)
    return value


def _draw_ceiling(axes: Any, records: Sequence[RooflineRecord]) -> None:
    copy, gemm = max(r.copy_bytes_per_s for r in records), max(r.gemm_flops_per_s for r in records)
    low = min(r.intensity for r in records) / 3
    high = max(max(r.intensity for r in records) * 3, 3 * gemm / copy)
    axes.plot([low, gemm / copy, high], [low * copy, gemm, gemm], color=MUTED, linewidth=1.6, label="measured ceiling")


def _log_axes(axes: Any) -> None:
    """Both axes logarithmic, their numbers as plain text."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axis.set_minor_locator(NullLocator())


def short_number(value: float) -> str:
    """`100 G`, `1 T`: round numbers with a metric prefix."""
    if value <= 0:
        return "0"
    power = min(5, max(0, math.floor(math.log10(value) / 3)))
    return f"{value / 1000**power:g}{['', ' k', ' M', ' G', ' T', ' P'][power]}"


def _short(subject: str, limit: int = 26) -> str:
    text = subject.replace("perplexity: ", "ppl ")
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
