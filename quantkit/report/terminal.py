"""Tables on a terminal, through rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_UNBOUNDED = 10_000
_ROWS = 2_000  # drawn: rich takes a third of a millisecond for each


def terminal_table(table: Table, console: Console) -> RenderableType:
    """A table for this console; where it is too narrow, columns of details are left out, where it is too long, its end.

    Args:
        table: to draw.
        console: whose width counts.
    """
    from rich.console import Group
    from rich.text import Text

    left_out = len(table.rows) - _ROWS
    if left_out > 0:
        note = f"{table.note}\n" if table.note else ""
        table = replace(table, rows=table.rows[:_ROWS], note=f"{note}{left_out} more rows: --json has all")
    every = range(len(table.columns))
    drawn = _drawn(table, every)
    # A measurement is cut off at the width that it is given.
    if console.measure(drawn, options=console.options.update(max_width=_UNBOUNDED)).maximum > console.width:
        drawn = _drawn(table, [position for position in every if not table.columns[position].detail])
    # A note may be wider than its table, so it is none of rich's captions.
    return Group(drawn, Text(table.note, style="dim")) if table.note else drawn


def _drawn(table: Table, positions: Sequence[int]) -> RenderableType:
    from rich.table import Table as RichTable

    drawn = RichTable(
        title=table.title or None,
        title_justify="left",
        title_style="",
        show_header=table.has_header,
        box=None,
        padding=(0, 2, 0, 0),
    )
    for position in positions:
        column, names_rows = table.columns[position], position == 0 and not table.has_header
        drawn.add_column(
            column.title,
            justify="left" if column.is_text else "right",
            # A number that is broken over two lines is misread; text may wrap.
            no_wrap=not column.is_text or names_rows,
            # An ellipsis swallows the ends of paths, which are there to be copied.
            overflow="fold",
            style="bold" if names_rows else "",
        )
    for row in table.cells:
        drawn.add_row(*(row[position] for position in positions))
    return drawn
