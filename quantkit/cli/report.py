"""`quantkit report`: compare several checkpoints, or render one report again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import RUN, option_group
from quantkit.cli._output import Command, Output

if TYPE_CHECKING:
    from quantkit.results import Report


@click.command("report", cls=Command, short_help="Compare checkpoints by their reports.")
@click.argument("checkpoints", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write an HTML page to this file.")
@option_group("how", {"overwrite": RUN["overwrite"]})
def command(output_to: Output, *, checkpoints: tuple[str, ...], output: Path | None, how: dict[str, Any]) -> None:
    """Compare CHECKPOINTS (report.json files, or directories that contain one) by size, accuracy and speed.

    With one checkpoint, its own report is rendered again from report.json.

    \b
    Examples:
      quantkit report demo-int4 demo-int8 demo-rtn3
      quantkit report demo-int4 demo-int8 -o comparison.html
      quantkit report demo-int4 -o page.html
    """
    from quantkit.report.files import read_report

    reports = [read_report(checkpoint) for checkpoint in checkpoints]
    if len(reports) == 1:
        _show_one(output_to, reports[0], output, **how)
    else:
        _show_many(output_to, reports, output, **how)


def _write_page(output: Path, page: Callable[[], str], overwrite: bool = False) -> None:
    from quantkit.output.staging import check_text, open_stage
    from quantkit.output.writer import write_text
    from quantkit.report.files import SIGNS

    check = partial(check_text, sign=SIGNS["report.html"])
    with open_stage(output, "report", overwrite=overwrite, check=check) as stage:
        draft = stage.work.path / output.name
        write_text(draft, page())
        stage.promote(draft)


def _show_one(output_to: Output, report: Report, output: Path | None, **how: Any) -> None:
    from quantkit.report.files import json_ready
    from quantkit.report.page import render_html
    from quantkit.report.tables import comparison_table, gate_lines, headline
    from quantkit.results.gates import gate_numbers

    if output is not None:
        _write_page(output, lambda: render_html(report), **how)
    lines = [headline(report), *gate_lines(report.gates)]
    metrics = json_ready(gate_numbers(report))
    data = {"model": report.model.name, "held": report.held, "metrics": metrics, "page": output and str(output)}
    output_to.result(data, "\n".join(lines), comparison_table(report.comparisons))


def _show_many(output_to: Output, reports: list[Report], output: Path | None, **how: Any) -> None:
    from quantkit.report.compare import checkpoints_table, compare_reports, comparison_sentence, render_comparisons

    comparison = compare_reports(reports)
    if output is not None:
        _write_page(output, lambda: render_comparisons({"Size, quality, speed": comparison}), **how)
    for warning in comparison.warnings:
        output_to.tell(f"warning: {warning}")
    data = {**asdict(comparison), "page": output and str(output)}
    output_to.result(data, checkpoints_table(comparison), comparison_sentence(comparison))
