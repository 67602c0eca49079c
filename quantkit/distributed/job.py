"""Start, join and end a job of several processes.

When a process fails, the launcher (torchrun or `launch`) ends the others, and torch raises an error in processes that
wait for it. This module makes sure that exactly one process reports the error.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TextIO

from quantkit.errors import InputError, ResourceError, first_line, require_linux
from quantkit.machine.system import available_cores, end_with_parent

RESUME = "run the same command again to continue, with any number of processes"
START = timedelta(minutes=30)
"""Time in which all processes of a job must connect. It is long because people and schedulers may start the processes
one after another."""

# Long waits are allowed: rank 0 may work alone for hours, and torch notices a dead process at once.
_PATIENCE = timedelta(days=7)
# Timeouts are recognized by their message, because torch has no class for them.
_TIMED_OUT = re.compile("timed out|time-?out", re.IGNORECASE)
_LAUNCHED = "QUANTKITLAUNCHED"  # set by `launch`, which reports a killed process itself
_STARTED = "TORCHELASTIC_RUN_ID"  # set by torchrun and `launch`, which end all processes when one fails
_FIRST_SPEAKS = 1.0  # seconds to wait for rank 0: if it fails too, it reports the error
_BEING_ENDED = 10.0  # seconds to wait for the launcher to end this process

_SEVERAL = "work in several processes (--nproc, torchrun)"

_rank, _world = 0, 1
_groups: dict[str, Any] = {}  # keyed by type of device
_store: Any = None  # torch's key-value store, shared by all processes


class LostError(ResourceError):
    """Another process of this job is gone."""


def rank() -> int:
    """Number of this process in its job, from 0."""
    return _rank


def world() -> int:
    """Number of processes in this job."""
    return _world


def is_writer() -> bool:
    """Whether this process writes the output and prints: true only for rank 0."""
    return rank() == 0


def is_launched() -> bool:
    """Whether torchrun, or `launch`, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextlib.contextmanager
def joined(explain: Callable[[BaseException], tuple[int, str]]) -> Iterator[None]:
    """Make this process part of the launcher's job, if there is one, while the block runs.

    At the end of the block, each process waits for all others. If processes fail, only one reports its error: rank 0 if
    it is among them.

    Args:
        explain: returns the exit code and a one-line message for an error.
    Raises:
        ResourceError: the system is not Linux.
    """
    global _rank, _world, _store
    if not is_launched() or _store is not None:
        yield
        return
    require_linux(_SEVERAL)
    stream = sys.stderr  # remembered, because stderr may later be redirected to hide messages of libraries
    if _STARTED in os.environ:
        end_with_parent(signal.SIGTERM)
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        _store = _meet()
        _open_groups(number, size)
        _rank, _world = number, size
        yield
        with lost_contact():
            _groups["cpu"].barrier().wait()
    except BaseException as error:
        _fail(error, *explain(error), stream)
        raise
    finally:
        _rank, _world, _store = 0, 1, None
        _groups.clear()


def _meet() -> Any:
    """Wait until all processes of the job are connected, and return torch's key-value store, which they share."""
    from torch.distributed.rendezvous import rendezvous

    try:
        store = next(rendezvous("env://", timeout=START))[0]
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store.set(f"here {number}", "")
        store.wait([f"here {other}" for other in range(size)], START)
    except (RuntimeError, OSError, ValueError) as error:
        text = first_line(error)
        if not _TIMED_OUT.search(text):  # such as a port in use or an unknown host
            raise InputError(
                f"cannot connect to the other processes: {text}; check MASTER_ADDR and MASTER_PORT"
            ) from error
        minutes = START.total_seconds() / 60
        text = f"not all processes of this job connected within {minutes:.0f} minutes ({text})"
        raise ResourceError(f"{text}; {RESUME}") from error
    store.set_timeout(_PATIENCE)
    return store


def _open_groups(number: int, size: int) -> None:
    # Not torch's default group: if there is one, libraries start collectives in it that other processes do not join.
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    _groups["cpu"] = ProcessGroupGloo(PrefixStore("gloo", _store), number, size, _PATIENCE)
    if _use_gpu(int(os.environ.get("LOCAL_RANK", number))):
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        _groups["cuda"] = ProcessGroupNCCL(PrefixStore("nccl", _store), number, size, options)


def _use_gpu(local: int) -> bool:
    """Make the GPU with index `local` current and return True; return False on a machine without GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return False
    if local >= count:
        raise InputError(
            f"there is no GPU for process {local} of this machine ({count} found); start at most {count} processes, "
            "or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    torch.cuda.set_device(local)
    return True


def group(device_type: str) -> Any:
    """Return the process group for tensors on this type of device."""
    return _groups[device_type]


def next_number(name: str) -> int:
    """Return how often this function was called before with this name, in all processes: 0, then 1, and so on."""
    return int(_store.add(name, 1)) - 1


@contextlib.contextmanager
def lost_contact() -> Iterator[None]:
    """Treat errors of torch in this block as the loss of another process.

    Raises:
        LostError: torch raised an error.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostError(f"lost contact with the other processes ({str(error)[:200]}); {RESUME}") from error


def _is_first_to_fail() -> bool:
    """Whether this call is the first of its kind in the job, so that this process should report its error."""
    try:
        return _store is None or next_number("failed") == 0
    except RuntimeError:  # the process with the store is gone, so one of the others must report the error
        return os.environ["RANK"] in ("0", "1")


def _fail(error: BaseException, code: int, text: str, stream: TextIO) -> None:
    """Report an error, unless another process has reported one, and end this process with exit code `code`.

    If rank 0 is the first to report, and the error is not a lost contact, the function returns instead, and the caller
    reports the error.
    """
    number, is_lost = int(os.environ["RANK"]), isinstance(error, LostError)
    if number and not is_lost:
        time.sleep(_FIRST_SPEAKS)
    if _is_first_to_fail():
        if not number and not is_lost:
            return
        if not is_lost or _LAUNCHED not in os.environ:
            _say(text if is_lost else f"rank {number}: {text}", stream)
    if is_lost and _STARTED in os.environ:
        time.sleep(_BEING_ENDED)  # so that the job gets the exit code of the process that failed
    os._exit(code)


def _say(text: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        stream.write(f"error: {text}\n")
        stream.flush()


def launch(nproc: int, command: Sequence[str]) -> int:
    """Run a command in several processes on this machine with torch's launcher, and return the exit code of the job.

    The processes report their errors themselves, and `launch` reports a process that was killed.

    Args:
        nproc: number of processes. They share the CPU's threads equally, unless OMP_NUM_THREADS is set.
        command: a program and its arguments.
    Raises:
        ResourceError: the system is not Linux.
    """
    require_linux(_SEVERAL)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    os.environ[_LAUNCHED] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    logging.disable(logging.CRITICAL)  # hides torch's message about a failure, which fills a page
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        codes = {number: failure.exitcode for number, failure in error.failures.items()}
        killed = next((number for number, code in codes.items() if code < 0 and code != -signal.SIGTERM), None)
        if killed is None:
            return next((code for code in codes.values() if code > 0), ResourceError.exit_code)
        text = f"rank {killed} was killed by signal {-codes[killed]}"
        _say(f"{text}; {RESUME}", sys.stderr)
        return ResourceError.exit_code
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        del os.environ[_LAUNCHED]
        logging.disable(logging.NOTSET)
    return 0
