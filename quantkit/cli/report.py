"""`quantkit report`: several checkpoints in one comparison, or one report rendered again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._output import Output, output_options

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from quantkit.report.tables import Table

_NARROW = ("", "original", "model", "recovery (95 %)", "verdict")
_MANY = ("", "size", "bits", "recovery (95 %)", "ITL", "gates", "front")

EPILOG = """\b
Examples:
  quantkit report demo-int4 demo-int8 demo-rtn3
  quantkit report demo-int4 demo-int8 -o comparison.html
  quantkit report demo-int4 -o page.html
"""


@click.command("report", epilog=EPILOG, short_help="Compare checkpoints by their reports.")
@click.argument("checkpoints", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write a page (HTML) here.")
@output_options
def report_command(output_to: Output, *, checkpoints: tuple[str, ...], output: Path | None) -> None:
    """Compare CHECKPOINTS, directories with a report.json or such files: size, accuracy, speed, and which to choose.

    With one checkpoint, its own report is rendered again from report.json.
    """
    from quantkit.report.json import read_report

    reports = [read_report(checkpoint) for checkpoint in checkpoints]
    if len(reports) == 1:
        _show_one(output_to, reports[0], output)
    else:
        _show_many(output_to, reports, output)


def _show_one(output_to: Output, report: Any, output: Path | None) -> None:
    from quantkit.report.html import render_html
    from quantkit.report.json import finite
    from quantkit.report.tables import comparison_table
    from quantkit.report.words import gate_lines, headline
    from quantkit.results.gates import measure

    if output is not None:
        output.write_text(render_html(report), encoding="utf-8")
    table = comparison_table(report)
    lines = [headline(report), *gate_lines(report.gates)]
    metrics = finite(measure(report))
    data = {"model": report.model.name, "held": report.held, "metrics": metrics, "page": _text(output)}
    output_to.result(lambda: data, lambda: "\n".join(lines), lambda: "" if table is None else _rich(table, _NARROW))


def _show_many(output_to: Output, reports: list[Any], output: Path | None) -> None:
    import dataclasses

    from quantkit.report.compare import compare_reports, comparison_sentence, comparison_table, render_comparison

    found = compare_reports(reports)
    if output is not None:
        output.write_text(render_comparison(found), encoding="utf-8")
    table = comparison_table(found)
    for warning in found.warnings if output_to.shows_progress else ():
        click.echo(f"warning: {warning}", err=True)
    output_to.result(
        lambda: {**dataclasses.asdict(found), "page": _text(output)},
        lambda: _rich(table, _MANY),
        lambda: f"{table.note}\n{comparison_sentence(found)}".strip(),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _rich(table: Table, columns: tuple[str, ...]) -> RichTable:
    """The columns that fit a terminal; the page and the model card have them all."""
    from rich.table import Table as RichTable

    shown = RichTable(box=None, padding=(0, 1, 0, 0))
    places = [table.columns.index(name) for name in columns]
    for place in places:
        first = place == 0
        longest = max(len(row[place]) for row in table.rows)
        shown.add_column(
            table.columns[place],
            justify="left" if first else "right",
            overflow="fold",
            min_width=min(longest, 22 if first else 6),
        )
    for row in table.rows:
        shown.add_row(*(row[place] for place in places))
    return shown


COMMAND = report_command
