"""Render `report.html`: one file that works offline, without scripts, in light and dark mode, in print and on phones.

The sections are in the order in which a reader needs them for a decision.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import ReportError
from quantkit.report import behaviour_tables, plots, speed_tables, tables
from quantkit.report.svg import INSTALL
from quantkit.report.table import Table
from quantkit.report.tables import headline, key_figures
from quantkit.results import Finding, Report
from quantkit.results.remedies import describe_proposal
from quantkit.results.statistics.summary import fit_gaps


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSection:
    """One section of a page.

    Args:
        name: one word, for links.
        title: heading.
        text: paragraphs at the top of the section.
        figures: `<svg>` elements.
        tables: visible tables.
        folded: collapsed tables.
        terms: definitions of terms.
        findings: findings of a diagnosis; the page adds the full stops.
        beside: whether the tables are placed beside the figures on a wide screen.
    """

    name: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    terms: Sequence[tuple[str, str]] = ()
    findings: Sequence[Finding] = ()
    beside: bool = False


def _section(
    name: str, title: str, tables: Sequence[Table | None], figures: Sequence[str | None] = (), **parts: Any
) -> PageSection | None:
    """Create a section; None if the first entry of `tables` is None."""
    shown = [table for table in tables if table is not None]
    drawn = [figure for figure in figures if figure is not None]
    if tables[0] is None:
        return None
    return PageSection(name=name, title=title, tables=shown, figures=drawn, **parts)


def _accuracy(report: Report) -> PageSection | None:
    unknown = "The noise floor was not measured, so small differences may come from arithmetic alone."
    return _section(
        "accuracy",
        "Accuracy",
        [tables.comparison_table(report.comparisons), tables.length_table(report.comparisons)],
        [plots.accuracy_plot(report)],
        text=[unknown] if report.noise is None else [],
        folded=[tables.verdict_table()],
    )


def _fidelity(report: Report) -> PageSection | None:
    table = tables.fidelity_table(report.fidelity, report.noise_fidelity)
    return _section("fidelity", "Closeness to the original", [table, tables.drift_table(report.drift)])


def _behaviour(report: Report) -> PageSection | None:
    shown: list[Table | None] = [*behaviour_tables.behaviour_tables(report, brief=False)]
    text = [
        "Both models answered chat prompts with the same seeds. Margins and KL are measured on the original's answers."
    ]
    return _section("behaviour", "Behaviour", shown or [None], text=text)


def _sensitivity(report: Report) -> PageSection | None:
    sensitivity = report.sensitivity
    if sensitivity is None or not sensitivity.records:
        return None
    text = ["Each fused group (linears that engines fuse: q/k/v, gate/up) was quantized alone in the original."]
    if (proposal := sensitivity.proposal) is not None:
        text.append(f"To lose less accuracy: {describe_proposal(proposal, most=len(proposal.groups))}.")
    return PageSection(
        name="sensitivity",
        title="Which parts are sensitive",
        text=text,
        figures=[plots.sensitivity_plot(sensitivity)],
        tables=[tables.worst_groups_table(sensitivity)],
        beside=True,
        folded=[tables.sensitivity_table(sensitivity)],
    )


def _diagnosis(report: Report) -> PageSection | None:
    if report.diagnosis is None or not report.diagnosis.findings:
        return None
    title = "What limits speed, and what to try"
    return PageSection(name="diagnosis", title=title, findings=report.diagnosis.findings)


def _speed(report: Report) -> PageSection | None:
    runs = list(speed_tables.report_runs(report))
    fits = [(f"ITL, {label}", fit_gaps(run)) for label, run in runs]
    first = report.benchmark.runs[0].workload.name if runs and report.benchmark else ""
    return _section(
        "speed",
        "Speed",
        [speed_tables.latency_table(runs), speed_tables.throughput_table(runs), speed_tables.fit_table(fits)],
        [plots.latency_plot(report, "TTFT"), plots.latency_plot(report, "ITL"), plots.context_plot(report)],
        text=[f"The plots show only the workload {first}; the tables show every workload."],
    )


def _memory(report: Report) -> PageSection | None:
    table = speed_tables.memory_table(report.benchmark, report.baseline_benchmark)
    return _section("memory", "Memory", [table], [plots.memory_plot(report)], beside=True)


def _roofline(report: Report) -> PageSection | None:
    sides = (("original", report.baseline_benchmark), ("model", report.benchmark))
    table = speed_tables.roofline_table((label, r) for label, side in sides if side for r in side.roofline)
    text = [
        (
            "A step on the line is as fast as this machine allows. Decode steps are labelled with their batch size, "
            "prefill steps with their number of tokens."
        )
    ]
    return _section("roofline", "Roofline", [table], [plots.roofline_plot(report)], text=text, beside=True)


def _making(report: Report) -> PageSection:
    return PageSection(
        name="making",
        title="How it was made and measured",
        text=report.notes,
        tables=[tables.making_table(report)],
        folded=[tables.environment_table(report)],
    )


def _terms(report: Report) -> PageSection:
    words = yaml.safe_load(Path(__file__).with_name("templates").joinpath("terms.yaml").read_text("utf-8"))
    terms = [*words["quality"].items()]
    if report.benchmark is not None:
        latencies = speed_tables.LATENCIES.items()
        terms += [(name, f"{meaning.capitalize()}: {text}") for name, (meaning, text) in latencies]
        terms += words["speed"].items()
    return PageSection(name="terms", title="What the words mean", terms=terms)


SECTIONS = (_accuracy, _fidelity, _behaviour, _sensitivity, _diagnosis, _speed, _memory, _roofline, _making, _terms)


def report_sections(report: Report) -> list[PageSection]:
    """Return the sections that are not empty, in order."""
    return [section for build in SECTIONS if (section := build(report)) is not None]


def render_html(report: Report) -> str:
    """Render the page of one report.

    Raises:
        ReportError: matplotlib or jinja2 is not installed; the message gives the command that installs it.
    """
    against = f"against {report.baseline_model.name}" if report.baseline_model else "not compared with an original"
    made = [report.compression.recipe if report.compression else "", report.model.scheme, report.model.format]
    return render_page(
        title=report.model.name,
        subtitle=" · ".join([against, *(part for part in made if part)]),
        verdict=headline(report),
        held=report.held if report.gates else None,
        gates=report.gates,
        key_figures=key_figures(report),
        sections=report_sections(report),
    )


def render_page(**page: Any) -> str:
    """Render a page from quantkit's template.

    Args:
        page: variables of the template: `title` and `subtitle`; `verdict`, one sentence; `sections`; and, for a report:
            `held`, whether all gates held (None without gates), `gates`, and `key_figures`, each (name, figure,
            explanation).
    Raises:
        ReportError: jinja2 is not installed.
    """
    text: str = _environment().get_template("page.html").render({"held": None, "gates": (), "key_figures": (), **page})
    return text


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ReportError(f"report.html needs jinja2, which is not installed; {INSTALL}") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantkit.report", "templates"),
        # Names and texts come from untrusted checkpoints.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in the template is an error, not an empty place on the page.
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["together"] = keep_together
    return environment


def keep_together(text: str) -> str:
    """Replace the spaces between a number and its unit, and inside an interval, with non-breaking spaces."""
    text = re.sub(r"(?<=\d) (?=(?:[KMG]iB|B|ms|s|%)(?:\W|$))", "\u00a0", text)
    return re.sub(r"\([-+.\d]+ to [-+.\d]+\)", lambda match: match[0].replace(" ", "\u00a0"), text)
