"""What all commands share: help that ends in examples, results to stdout, everything else to stderr."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from quantkit.cli._errors import say
from quantkit.distributed import is_writer
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
        return is_writer() and not (self.as_json or self.quiet)

    def tell(self, text: str) -> None:
        """A line of progress, or a warning, if wanted."""
        if self.shows_progress:
            say(text, self.stream)

    def result(self, data: Callable[[], Any], *shown: Callable[[], Table | RenderableType | None]) -> None:
        """Print a result, as JSON or for people; of several processes one does.

        Args:
            data: builds the object for --json.
            shown: build what people see, one below the other with a blank line between; None shows nothing.
        """
        if not is_writer():
            return
        if self.as_json:
            click.echo(json.dumps(data(), ensure_ascii=False))
            return
        from quantkit.report.table import Table, terminal_table

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


class _Documented(click.Command):
    """A command whose docstring is the whole of its help: what begins at the first `\\b` is printed below the options.

    Args:
        help: the docstring; click keeps the lines of a paragraph that begins with `\\b` as they are.
        epilog: printed before them, in the same paragraph.
    """

    def __init__(self, name: str | None, *, help: str | None = None, epilog: str = "\b", **settings: Any) -> None:
        text, _, below = inspect.cleandoc(help or "").partition("\b\n")
        super().__init__(name, help=text.rstrip(), epilog=f"{epilog}\n{below}", **settings)


class Command(_Documented):
    """A command with --json, --quiet and --verbose; its function gets them as `output_to`, an Output."""

    def __init__(self, name: str | None, *, params: list[click.Parameter] | None = None, **settings: Any) -> None:
        own = (
            click.Option(["--json", "as_json"], is_flag=True, help="One JSON object on stdout, nothing else."),
            click.Option(["--quiet"], is_flag=True, help="No progress and no warnings."),
            click.Option(["--verbose"], is_flag=True, expose_value=False, help="Tracebacks of errors."),
        )
        super().__init__(name, params=[*(params or ()), *own], **settings)

    def invoke(self, ctx: click.Context) -> Any:
        quiet = ctx.params.pop("quiet")
        logging.getLogger("quantkit").setLevel(logging.ERROR if quiet else logging.NOTSET)
        ctx.params["output_to"] = Output(as_json=ctx.params.pop("as_json"), quiet=quiet)
        return super().invoke(ctx)


class CommandGroup(_Documented, click.Group):
    """A group of such commands."""

    command_class = Command


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup and no guessed colours.

    Args:
        stderr: where to; stdout otherwise.
    """
    from rich.console import Console

    # To rich's markup a name in brackets, as in recovery[task], may be a style, and is not printed.
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=False)
