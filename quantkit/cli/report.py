"""`quantkit report`: several checkpoints in one comparison, or one report rendered again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli._output import Command, Output

if TYPE_CHECKING:
    from quantkit.results import Report


@click.command("report", cls=Command, short_help="Compare checkpoints by their reports.")
@click.argument("checkpoints", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write a page (HTML) here.")
def report_command(output_to: Output, *, checkpoints: tuple[str, ...], output: Path | None) -> None:
    """Compare CHECKPOINTS, directories with a report.json or such files: size, accuracy, speed, and which to choose.

    With one checkpoint, its own report is rendered again from report.json.

    \b
    Examples:
      quantkit report demo-int4 demo-int8 demo-rtn3
      quantkit report demo-int4 demo-int8 -o comparison.html
      quantkit report demo-int4 -o page.html
    """
    from quantkit.report.json import read_report

    reports = [read_report(checkpoint) for checkpoint in checkpoints]
    if len(reports) == 1:
        _show_one(output_to, reports[0], output)
    else:
        _show_many(output_to, reports, output)


def _show_one(output_to: Output, report: Report, output: Path | None) -> None:
    from quantkit.report.html import render_html
    from quantkit.report.json import json_ready
    from quantkit.report.tables import comparison_table
    from quantkit.report.words import gate_lines, headline
    from quantkit.results.gates.metrics import gate_numbers

    if output is not None:
        output.write_text(render_html(report), encoding="utf-8")
    lines = [headline(report), *gate_lines(report.gates)]
    metrics = json_ready(gate_numbers(report))
    data = {"model": report.model.name, "held": report.held, "metrics": metrics, "page": output and str(output)}
    output_to.result(lambda: data, lambda: "\n".join(lines), lambda: comparison_table(report.comparisons))


def _show_many(output_to: Output, reports: list[Report], output: Path | None) -> None:
    from quantkit.report.compare import checkpoints_table, compare_reports, comparison_sentence, render_comparison

    comparison = compare_reports(reports)
    if output is not None:
        output.write_text(render_comparison(comparison), encoding="utf-8")
    for warning in comparison.warnings:
        output_to.tell(f"warning: {warning}")
    output_to.result(
        lambda: {**asdict(comparison), "page": output and str(output)},
        lambda: checkpoints_table(comparison),
        lambda: comparison_sentence(comparison),
    )


COMMAND = report_command
