"""Tables independent of the output medium, and their rendering on a terminal with rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantkit.quantities import MISSING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def printable(text: str) -> str:
    """Escape control characters in untrusted text, such as terminal escape sequences and text-direction marks."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Args:
        title: heading; empty for none.
        show: function that formats a value. A column with such a function is right-aligned; a column without one holds
            text and is left-aligned.
        detail: whether to omit the column on a terminal that is too narrow for all columns.
    """

    title: str = ""
    show: Callable[[Any], str] | None = None
    detail: bool = False

    @property
    def is_text(self) -> bool:
        return self.show is None

    def cell(self, value: Any) -> str:
        """Format a value; a dash if it is None."""
        if value is None:
            return MISSING
        return printable(str(value) if self.show is None or isinstance(value, str) else self.show(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Values in rows; the first column names the row.

    Args:
        title: title of the table.
        columns: columns with their formats.
        rows: rows with one value per column.
        note: text below the table; empty for none.
    """

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """Format every row as text."""
        return [[column.cell(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]

    @property
    def has_header(self) -> bool:
        return any(column.title for column in self.columns)


def facts(rows: Iterable[tuple[str, str | None]], title: str = "") -> Table:
    """Create a table of names and values without headings; empty values and None are left out."""
    return Table(title=title, columns=(Column(), Column()), rows=tuple(row for row in rows if row[1]))


_UNBOUNDED = 10_000
_ROWS = 2_000  # maximum to draw: rich takes a third of a millisecond for each


def terminal_table(table: Table, console: Console) -> RenderableType:
    """Render a table for a console; omit detail columns if the table is too wide, and the last rows if it is too long.

    Args:
        table: table to render.
        console: console that determines the width.
    """
    from rich.console import Group
    from rich.text import Text

    left_out = len(table.rows) - _ROWS
    if left_out > 0:
        note = f"{table.note}\n" if table.note else ""
        table = replace(table, rows=table.rows[:_ROWS], note=f"{note}{left_out} more rows; --json prints all")
    every = range(len(table.columns))
    drawn = _drawn(table, every)
    # Measured without the console's width, at which rich would cut the result off.
    if console.measure(drawn, options=console.options.update(max_width=_UNBOUNDED)).maximum > console.width:
        drawn = _drawn(table, [position for position in every if not table.columns[position].detail])
    # Not a caption, which rich would wrap at the width of the table.
    return Group(drawn, Text(printable(table.note), style="dim")) if table.note else drawn


def _drawn(table: Table, positions: Sequence[int]) -> RenderableType:
    from rich.table import Table as RichTable

    drawn = RichTable(
        title=printable(table.title) or None,
        title_justify="left",
        title_style="",
        show_header=table.has_header,
        box=None,
        padding=(0, 2, 0, 0),
    )
    for position in positions:
        column, names_rows = table.columns[position], position == 0 and not table.has_header
        drawn.add_column(
            printable(column.title),
            justify="left" if column.is_text else "right",
            # A number that is broken over two lines is misread; text may wrap.
            no_wrap=not column.is_text or names_rows,
            # An ellipsis would hide the ends of paths, which users copy.
            overflow="fold",
            style="bold" if names_rows else "",
        )
    for row in table.cells:
        drawn.add_row(*(row[position] for position in positions))
    return drawn
