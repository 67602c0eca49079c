"""`report.html`: one file that opens offline, reads without scripts, in light and dark, on paper and on a phone."""

import re
from typing import Any

from quantkit.errors import ReportError
from quantkit.report.sections import report_sections
from quantkit.report.svg import INSTALL
from quantkit.report.tables import key_figures
from quantkit.report.words import headline
from quantkit.results import Report


def render_html(report: Report) -> str:
    """The page of one report.

    Raises:
        ReportError: matplotlib or jinja2 is not installed; the message names the command.
    """
    against = f"against {report.baseline_model.name}" if report.baseline_model else "without an original beside it"
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
    """A page of the house's look.

    Args:
        page: what the template shows: `title` and `subtitle`; `verdict`, one sentence; `held`, whether that is good or
            None when there is nothing to judge; `gates`; `key_figures`, each (name, figure, what it is beside); and
            `sections`.
    Raises:
        ReportError: jinja2 is not installed.
    """
    text: str = _environment().get_template("page.html").render(page)
    return text


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ReportError(f"report.html needs jinja2, which is not installed; {INSTALL}") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantkit.report", "templates"),
        # Names and texts come from checkpoints of strangers.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in the template is an error, not an empty place on the page.
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["together"] = keep_together
    return environment


def keep_together(text: str) -> str:
    """Numbers with their units, and intervals, on one line: spaces that do not break."""
    text = re.sub(r"(?<=\d) (?=(?:[KMG]iB|B|ms|s|%)(?:\W|$))", "\u00a0", text)
    return re.sub(r"\([-+.\d]+ to [-+.\d]+\)", lambda match: match[0].replace(" ", "\u00a0"), text)
