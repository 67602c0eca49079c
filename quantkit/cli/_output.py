"""What all commands share: results to stdout, everything else to stderr, and an exit code for every error.

0 done · 1 a bug · 2 usage · 4 bad input · 5 out of disk, memory or device memory · 130 interrupted
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from quantkit.errors import GateFailure, QuantkitError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from quantkit.report.table import Table

__all__ = ["Output", "output_options", "report_error"]

USAGE, RESOURCES, INTERRUPTED = 2, 5, 130


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


def say(text: str, stream: TextIO | None = None) -> None:
    """A line on stderr. That nobody reads it is no reason to end hours of work."""
    with contextlib.suppress(OSError):
        click.echo(text, file=stream or sys.stderr)


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


def report_error(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Tell an error in one line on stderr, and with --json also as an object on stdout.

    Args:
        error: whatever ended the command.
        as_json: whether stdout carries JSON.
        verbose: whether to print the traceback first.
    Returns:
        the exit code.
    """
    if verbose and not isinstance(error, click.exceptions.ClickException | click.Abort):
        traceback.print_exception(error, file=sys.stderr)
    code, text = explain(error)
    if as_json:
        click.echo(json.dumps({"error": text, "exit_code": code}, ensure_ascii=False))
    if isinstance(error, click.UsageError) and not as_json:
        error.show(sys.stderr)  # usage line and a pointer to --help, as click users know it
    else:
        click.echo(f"error: {text}", err=True)
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and one line for an error."""
    if isinstance(error, QuantkitError):
        return error.exit_code, _one_line(str(error))
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return (
            INTERRUPTED,
            "interrupted; quantize, search and tune go on where they stopped when the same command is given again",
        )
    if isinstance(error, click.ClickException):
        return error.exit_code, _one_line(error.format_message())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            RESOURCES,
            f"no space left on the disk of {error.filename or 'the output'}; free some, or give another -o",
        )
    if _is_memory(error):
        advice = "when compressing try fewer --samples or --activations disk, when running a smaller --kv-memory"
        return RESOURCES, f"out of memory: {_one_line(str(error))[:200]}; {advice}"
    what = f"{type(error).__name__}: {_one_line(str(error))}"
    return 1, f"{what}; this is a bug; run again with --verbose for the traceback"


def _is_memory(error: BaseException) -> bool:
    # Torch's classes are told by name and text: torch is not imported to report an error, and its CPU allocator
    # raises a plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
