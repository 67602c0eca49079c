"""What all commands share: results to stdout, everything else to stderr."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from quantkit.cli._errors import say
from quantkit.errors import GateFailure

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from quantkit.report.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """How the user wants to be answered.

    Args:
        as_json: one JSON object on stdout and nothing else there.
        quiet: results only; no progress and no warnings.
        stream: for progress; that of now, while a library's own words are kept away from stderr.
    """

    as_json: bool
    quiet: bool
    stream: TextIO | None = field(default_factory=lambda: sys.stderr)

    @property
    def shows_progress(self) -> bool:
        """Whether progress and warnings go to stderr."""
        return not (self.as_json or self.quiet)

    def tell(self, text: str) -> None:
        """A line of progress, or a warning, if wanted."""
        if self.shows_progress:
            say(text, self.stream)

    def result(self, data: Callable[[], Any], *shown: Callable[[], Table | RenderableType | None]) -> None:
        """Print a result, as JSON or for people.

        Args:
            data: builds the object for --json.
            shown: build what people see, one below the other with a blank line between; None shows nothing.
        """
        if self.as_json:
            click.echo(json.dumps(data(), ensure_ascii=False))
            return
        from quantkit.report.table import Table
        from quantkit.report.terminal import terminal_table

        console = plain_console()
        parts = [part for build in shown if (part := build()) is not None]
        for position, part in enumerate(parts):
            drawn = terminal_table(part, console) if isinstance(part, Table) else part
            console.print(*([""] if position else []), drawn, sep="\n")

    def require(self, held: bool, failure: Callable[[], str]) -> None:
        """End with the exit code of a gate unless it held; with --json that code alone says so.

        Raises:
            GateFailure: it did not, in the words of `failure`.
        """
        if held:
            return
        if self.as_json:
            click.get_current_context().exit(GateFailure.exit_code)
        raise GateFailure(failure())


def output_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --json, --quiet and --verbose to a command, which gets them as its first argument, an Output."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
    @click.option("--quiet", is_flag=True, help="No progress and no warnings.")
    @click.option("--verbose", is_flag=True, expose_value=False, help="Tracebacks of errors.")
    @functools.wraps(function)
    def command(*, as_json: bool, quiet: bool, **options: Any) -> None:
        function(Output(as_json=as_json, quiet=quiet), **options)

    return command


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup and no guessed colours.

    Args:
        stderr: where to; stdout otherwise.
    """
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=False)
