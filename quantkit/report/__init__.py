"""Reports: results in, text out. JSON, a page, a model card, JUnit XML, and comparisons of several. Torch-free."""

from quantkit.report.compare import CheckpointComparison, compare_reports, render_comparison
from quantkit.report.files import write_report
from quantkit.report.html import render_html
from quantkit.report.json import read_report
from quantkit.report.junit import render_junit
from quantkit.report.markdown import render_markdown

__all__ = [
    "CheckpointComparison",
    "compare_reports",
    "read_report",
    "render_comparison",
    "render_html",
    "render_junit",
    "render_markdown",
    "write_report",
]
