"""Whatever ends a command becomes one line on stderr and an exit code, also where the streams themselves fail.

0 done · 1 a bug · 2 usage · 3 a gate · 4 bad input · 5 out of disk, memory or device memory, or not on Linux
130 interrupted · 141 nobody reads stdout
"""

import atexit
import contextlib
import errno
import json
import os
import re
import resource
import sys
import traceback
from collections.abc import Iterator
from typing import TextIO

import click

from quantkit.errors import InputError, QuantkitError, ResourceError, is_panic

_LONGEST_LINE = 2000
INTERRUPTED, READER_GONE = 128 + 2, 128 + 13  # as a shell says of what SIGINT and SIGPIPE end

# Torch's classes and the loader's failures are told by name and text: nothing is imported to report an error, C++ and
# torch's CPU allocator raise a plain RuntimeError, and a library that cannot be mapped is an ImportError.
_NO_MEMORY = re.compile(r"can(no|')t allocate memory|bad_alloc|failed to map segment|can't start new thread", re.I)


def open_streams() -> None:
    """Lead the streams that a caller has closed nowhere, before a file is opened under their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - for as long as the process


def say(text: str, stream: TextIO | None = None) -> None:
    """A line on stderr. That nobody reads it is no reason to end hours of work."""
    with contextlib.suppress(OSError):
        click.echo(text, file=stream or sys.stderr)


def end_output() -> BaseException | None:
    """Write what stdout still holds; what is in the way of that, if anything, is returned and tried no more."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
            # Python flushes stdout once more at exit, which cannot fail on the null device.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        if isinstance(error, BrokenPipeError):
            return error
        return ResourceError(f"cannot write to stdout: {error.strerror}; send the output to another place")
    return None


def report_error(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Tell an error in one line on stderr, and with --json also as an object on stdout.

    Args:
        error: whatever ended the command.
        as_json: whether stdout carries JSON.
        verbose: whether to print the traceback first.
    Returns:
        the exit code.
    """
    if isinstance(error, BrokenPipeError):
        return READER_GONE  # as quiet as every other command in front of `head`
    if verbose and not isinstance(error, click.exceptions.ClickException | click.Abort):
        traceback.print_exception(error, file=sys.stderr)
    code, text = explain(error)
    if code == ResourceError.exit_code:  # what else fails at the end, for want of the same, has nothing to add
        atexit.register(setattr, sys, "unraisablehook", lambda _: None)
    if as_json:
        with contextlib.suppress(OSError):
            click.echo(json.dumps({"error": text, "exit_code": code}, ensure_ascii=False))
        end_output()
    if isinstance(error, click.UsageError) and not as_json:
        with contextlib.suppress(OSError):
            error.show(sys.stderr)  # usage line and a pointer to --help, as click users know it
    else:
        say(f"error: {text}")
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and one line for an error."""
    if isinstance(error, QuantkitError):
        return error.exit_code, _one_line(str(error))
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return (
            INTERRUPTED,
            "interrupted; quantize and search go on where they stopped when the same command is given again",
        )
    if isinstance(error, click.ClickException):
        return error.exit_code, _one_line(error.format_message())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = error.filename or "the output"
        return ResourceError.exit_code, f"no space left on the disk of {what}; free some, or write to another"
    shortage = next(filter(_is_memory, _chain(error)), None)
    if shortage is not None:
        what = _one_line(str(shortage))[:200] or type(shortage).__name__
        advice = "when compressing see `quantkit plan --recipe`, and on a GPU try --activations disk"
        return ResourceError.exit_code, f"out of memory: {what}; {advice}; when running try a smaller --kv-memory"
    if is_panic(error):  # on what a file says, such as a tokenizer's regular expression that gives up on a text
        return InputError.exit_code, f"a library written in Rust fails on a file or text: {_one_line(str(error))}"
    what = f"{type(error).__name__}: {_one_line(str(error))}"
    return 1, f"{what}; this is a bug; run again with --verbose for the traceback"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: libraries wrap what they cannot import in errors of their own."""
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
        # C code that loses its MemoryError; without a limit on the process it is a bug of its own.
        or (isinstance(error, SystemError) and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY)
    )


def _one_line(text: str) -> str:
    """A text of at most some screens, without what terminals obey."""
    # Cut before it is split: a message may quote megabytes of a file.
    line = " ".join(text[: 2 * _LONGEST_LINE].split())
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[: _LONGEST_LINE - 3]}..."
