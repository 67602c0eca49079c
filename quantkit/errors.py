"""All deliberate errors of quantkit, and their exit codes on the command line.

    QuantkitError                 base class of the others; never raised itself
    ├── InputError          4     input from the user that cannot be used
    │   ├── ModelError            the model directory: config, architecture, weights
    │   ├── CheckpointError       a file on disk: missing, truncated, inconsistent
    │   ├── RecipeError           a recipe: unknown key, bad value, impossible combination
    │   ├── SchemeError           a number scheme that does not fit a tensor or a format
    │   ├── DataError             text, images or task items for calibration or evaluation
    │   ├── GateError             a gate that is not valid or names an unknown metric
    │   ├── ReportError           a report.json that is missing or damaged, or has an unsupported version
    │   ├── OutputError           an output path that cannot be written or is already taken
    │   ├── RequestError          a prompt or its sampling parameters
    │   └── ResumeError           an interrupted run whose inputs differ from those of this run
    ├── GateFailure         3     a gate did not hold, or a search missed its target
    ├── ResourceError       5     out of disk, memory or device memory, or Linux is needed
    └── AuditError          1     the finished checkpoint differs from the plan: a bug, never the user's fault

A message is one line. It says what is wrong, where (tensor, key or path), which value was found, and what to do.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_LONGEST_NAME = 200  # characters; the time of comparing two names grows with the product of their lengths
_LONGEST_LINE = 240  # of a longer line, only the first sentence is kept


class QuantkitError(Exception):
    """Base class of all deliberate errors; `exit_code` is the exit code of a command that ends with the error."""

    exit_code = 1


class InputError(QuantkitError):
    """Input from the user cannot be used."""

    exit_code = 4


class ModelError(InputError):
    """The model cannot be understood: its config, architecture or weights."""


class CheckpointError(InputError):
    """A checkpoint file is missing, truncated or inconsistent."""


class RecipeError(InputError):
    """A recipe has an unknown key, a bad value or an impossible combination."""


class SchemeError(InputError):
    """A number scheme does not fit a tensor or an on-disk format."""


class DataError(InputError):
    """Data for calibration or evaluation cannot be read or is unusable."""


class GateError(InputError):
    """A gate is not valid or names a metric that no report has."""


class ReportError(InputError):
    """A report is missing or damaged, or has an unsupported version."""


class OutputError(InputError):
    """The output path cannot be written or is already taken."""


class RequestError(InputError):
    """A prompt, its sampling parameters or its memory demand cannot be served."""


class ResumeError(InputError):
    """The inputs of this run differ from those of the interrupted run."""


class GateFailure(QuantkitError):
    """A gate did not hold, or a search missed its target; the message says which, and what to change."""

    exit_code = 3


class ResourceError(QuantkitError):
    """Disk, memory or device memory is full, or the operation needs Linux; the message says what to do."""

    exit_code = 5


class AuditError(QuantkitError):
    """The finished checkpoint differs from the plan; this is a bug in quantkit."""


def require_linux(what: str) -> None:
    """Refuse something that works only on Linux.

    Args:
        what: what needs Linux, e.g. an option; the message begins with this text.
    Raises:
        ResourceError: the system is not Linux.
    """
    if sys.platform != "linux":
        raise ResourceError(f"{what} needs Linux, and this is {sys.platform}; leave it out, or on Windows use WSL 2")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` (a file, module or key) in front of the messages of quantkit's errors that the block raises."""
    try:
        yield
    except QuantkitError as error:
        raise type(error)(f"{where}: {error}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, or the error's type if the message is empty.

    If that line is long, return only its first sentence.
    """
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= _LONGEST_LINE else line.partition(". ")[0]


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library. Panics do not derive from Exception, and each library has its own
    class for them.
    """
    return type(error).__name__ == "PanicException"


def suggestion(name: str, options: Iterable[str]) -> str:
    """Return ` (did you mean 'X'?)` with the option most similar to a name; empty if no option is similar.

    Args:
        name: name that the user gave.
        options: valid names.
    """
    close = difflib.get_close_matches(name[:_LONGEST_NAME], list(options), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
