"""A table that knows nothing of where it is shown: drawn by `terminal`, `markdown` and the page's template."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.quantities import MISSING


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        title: its heading; empty for none.
        show: writes a value that is not text yet. Columns that have it are flush right, others are text, flush left.
        detail: left out where there is too little room for all columns, which happens on terminals.
    """

    title: str = ""
    show: Callable[[Any], str] | None = None
    detail: bool = False

    @property
    def is_text(self) -> bool:
        return self.show is None

    def cell(self, value: Any) -> str:
        """A value as text; a dash for what is not known."""
        if value is None or isinstance(value, str):
            return MISSING if value is None else value
        return str(value) if self.show is None else self.show(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Values in rows; the first column names the row.

    Args:
        title: what the table shows.
        columns: how each is written.
        rows: as many values as columns each.
        note: to be printed below; empty for none.
    """

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """Every row as text."""
        return [[column.cell(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]

    @property
    def has_header(self) -> bool:
        return any(column.title for column in self.columns)


def facts(rows: Iterable[tuple[str, str | None]], title: str = "") -> Table:
    """Names and what belongs to them, without headings; what is empty or None is left out."""
    return Table(title=title, columns=(Column(), Column()), rows=tuple(row for row in rows if row[1]))
