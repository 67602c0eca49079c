"""Output of all commands: help that ends in examples, results on stdout, everything else on stderr.

An error that ends a command becomes one line on stderr and an exit code, even if stdout or stderr fails.

Exit codes: 0 done · 1 a bug · 2 wrong usage · 3 a gate failed · 4 bad input
5 out of disk, memory or device memory, or Linux is needed · 130 interrupted · 141 the reader of stdout closed it
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import inspect
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from quantkit.distributed import is_writer
from quantkit.errors import GateFailure, InputError, QuantkitError, ResourceError, is_panic
from quantkit.machine.system import has_memory_limit
from quantkit.report.table import Table, printable, terminal_table

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST_LINE = 2000
INTERRUPTED, READER_GONE = 128 + 2, 128 + 13  # as a shell reports processes ended by SIGINT and SIGPIPE

# Memory errors of torch and of the dynamic loader are recognized by class name and message, so that reporting an error
# imports nothing. C++ and torch's CPU allocator raise a plain RuntimeError. A library that cannot be mapped raises an
# ImportError.
_NO_MEMORY = re.compile(r"can(no|')t allocate memory|bad_alloc|failed to map segment|can't start new thread", re.I)


def open_streams() -> None:
    """Prepare stdin, stdout and stderr.

    Open the null device for each stream that the caller closed, because a file opened later would get the stream's
    descriptor number. On Windows, use UTF-8 instead of the code page.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open until the process ends
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper) and sys.platform == "win32":
            stream.reconfigure(encoding="utf-8")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line on stderr, or on another stream. If the stream is closed, print nothing, so that work can go on."""
    with contextlib.suppress(OSError):
        click.echo(printable(text), file=stream or sys.stderr)


def end_output() -> BaseException | None:
    """Flush stdout; if that fails, close it and return the error."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
            # Python flushes stdout once more at exit, which cannot fail on the null device.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        if isinstance(error, BrokenPipeError):
            return error
        return ResourceError(f"cannot write to stdout: {error.strerror}; redirect the output elsewhere")
    return None


def report_error(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Print an error as one line on stderr, and with --json also as an object on stdout.

    Args:
        error: exception that ended the command.
        as_json: whether stdout carries JSON.
        verbose: whether to print the traceback first.
    Returns:
        The exit code.
    """
    if isinstance(error, BrokenPipeError):
        return READER_GONE  # print nothing, like other commands piped into `head`
    if verbose and not isinstance(error, click.exceptions.ClickException | click.Abort):
        traceback.print_exception(error, file=sys.stderr)
    code, text = explain(error)
    if code == ResourceError.exit_code:  # errors at exit would only repeat this one
        atexit.register(setattr, sys, "unraisablehook", lambda _: None)
    if as_json:
        with contextlib.suppress(OSError):
            click.echo(json.dumps({"error": text, "exit_code": code}, ensure_ascii=False))
        end_output()
    if isinstance(error, click.UsageError) and not as_json:
        with contextlib.suppress(OSError):
            error.show(sys.stderr)  # click's own form: the usage line and a pointer to --help
    else:
        say(f"error: {text}")
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and one line for an error."""
    if isinstance(error, QuantkitError):
        return error.exit_code, _one_line(str(error))
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED, "interrupted; to continue quantize, search or distill, run the same command again"
    if isinstance(error, click.ClickException):
        return error.exit_code, _one_line(error.format_message())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = error.filename or "the output"
        return ResourceError.exit_code, (
            f"no space left on the disk of {what}; free some space, or write to another disk"
        )
    shortage = next(filter(_is_memory, _chain(error)), None)
    if shortage is not None:
        what = _one_line(str(shortage))[:200] or type(shortage).__name__
        advice = "for compression, see `quantkit plan --recipe`, and on a GPU try --activations disk"
        return ResourceError.exit_code, f"out of memory: {what}; {advice}; to run a model, try a smaller --kv-memory"
    if is_panic(error):  # caused by a file, such as a tokenizer's regular expression that fails on a text
        return InputError.exit_code, (
            f"a library written in Rust failed on a file or text ({_one_line(str(error))}); check the model's files"
        )
    what = f"{type(error).__name__}: {_one_line(str(error))}"
    return 1, f"{what}; this is a bug; run again with --verbose for the traceback"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; libraries wrap failed imports in errors of their own."""
    seen: list[BaseException] = []
    # Causes may form a ring.
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def _is_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError | ImportError | OSError) and bool(_NO_MEMORY.search(str(error))))
        # C code may turn a MemoryError into a SystemError; without a memory limit, a SystemError is a bug.
        or (isinstance(error, SystemError) and has_memory_limit())
    )


def _one_line(text: str) -> str:
    """Join a text into one line of at most 2,000 characters, without control characters."""
    # Cut before it is split: a message may quote megabytes of a file.
    line = " ".join(text[: 2 * _LONGEST_LINE].split())
    shown = printable(line)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[: _LONGEST_LINE - 3]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """How a command prints its progress and its result.

    Args:
        as_json: print one JSON object on stdout, and nothing else on stdout.
        quiet: print results only, no progress and no warnings.
        stream: stream for progress: the original stderr, even while stderr is redirected to hide output of libraries.
    """

    as_json: bool
    quiet: bool
    stream: TextIO | None = field(default_factory=lambda: sys.stderr)

    @property
    def shows_progress(self) -> bool:
        """Whether progress and warnings go to stderr."""
        return is_writer() and not (self.as_json or self.quiet)

    def tell(self, text: str) -> None:
        """Print a progress message or a warning, if the user wants them."""
        if self.shows_progress:
            say(text, self.stream)

    def result(self, data: Any, *shown: Table | str | None) -> None:
        """Print a result, as JSON or for people; in a job of several processes, only the writer prints.

        Args:
            data: object for --json.
            shown: parts to print for people, separated by blank lines; None is skipped.
        """
        if not is_writer():
            return
        if self.as_json:
            click.echo(json.dumps(data, ensure_ascii=False))
            return
        console = plain_console()
        for position, part in enumerate(part for part in shown if part is not None):
            drawn = terminal_table(part, console) if isinstance(part, Table) else printable(part)
            console.print(*([""] if position else []), drawn, sep="\n")

    def require(self, held: bool, failure: str) -> None:
        """Raise GateFailure if `held` is False. With --json, instead end the command with the same exit code.

        Raises:
            GateFailure: `held` is False; `failure` is the message.
        """
        if held:
            return
        if self.as_json:
            click.get_current_context().exit(GateFailure.exit_code)
        raise GateFailure(failure)


class _Documented(click.Command):
    """A command whose docstring is its help; the part from the first `\b` on is printed below the options.

    Args:
        help: the docstring; click does not rewrap paragraphs that begin with `\b`.
        epilog: text printed between the options and that part.
    """

    def __init__(self, name: str | None, *, help: str | None = None, epilog: str = "\b", **settings: Any) -> None:
        text, _, below = inspect.cleandoc(help or "").partition("\b\n")
        super().__init__(name, help=text.rstrip(), epilog=f"{epilog}\n{below}", **settings)


class Command(_Documented):
    """A command with --json, --quiet and --verbose; its function receives an `Output` as `output_to`."""

    def __init__(self, name: str | None, *, params: list[click.Parameter] | None = None, **settings: Any) -> None:
        own = (
            click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object on stdout, nothing else."),
            click.Option(["--quiet"], is_flag=True, help="Print no progress and no warnings."),
            click.Option(["--verbose"], is_flag=True, expose_value=False, help="Print the tracebacks of errors."),
        )
        super().__init__(name, params=[*(params or ()), *own], **settings)

    def invoke(self, ctx: click.Context) -> Any:
        quiet = ctx.params.pop("quiet")
        logging.getLogger("quantkit").setLevel(logging.ERROR if quiet else logging.NOTSET)
        ctx.params["output_to"] = Output(as_json=ctx.params.pop("as_json"), quiet=quiet)
        return super().invoke(ctx)


class CommandGroup(_Documented, click.Group):
    """A group of `Command`s."""

    command_class = Command


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints plain text: no markup and no automatic colours.

    Args:
        stderr: whether to print on stderr instead of stdout.
    """
    from rich.console import Console

    # With markup, rich may take brackets, as in recovery[task], for a style and not print them.
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=False)
