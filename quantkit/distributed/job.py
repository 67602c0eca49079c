"""Start, join and end a job of several processes.

The launcher, torchrun or `launch`, ends the other processes when one fails, and torch raises an error in a process that
waits for a dead one. This module makes sure that exactly one process reports the error.
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
"""Time in which all processes of a job must connect: people and schedulers start them one after another."""

# torch notices a dead process at once, so a long wait is not an error: rank 0 may work alone for hours.
_PATIENCE = timedelta(days=7)
# torch has no class for timeout errors.
_TIMED_OUT = re.compile("timed out|time-?out", re.IGNORECASE)
_LAUNCHED = "QUANTKITLAUNCHED"  # set by `launch`, which itself reports which process was killed
_STARTED = "TORCHELASTIC_RUN_ID"  # set by torchrun and `launch`: both end the other processes when one fails
_FIRST_SPEAKS = 1.0  # seconds to wait for rank 0: if it fails too, it reports the error
_BEING_ENDED = 10.0  # seconds to wait for the launcher to end this process

_SEVERAL = "work in several processes (--nproc, torchrun)"

_rank, _world = 0, 1
_groups: dict[str, Any] = {}  # keyed by type of device
_store: Any = None  # torch's key-value store, shared by all processes


class LostError(ResourceError):
    """Another process of this job is gone."""


def rank() -> int:
    """Number of this process in its job."""
    return _rank


def world() -> int:
    """Number of processes in this job."""
    return _world


def is_writer() -> bool:
    """Whether this process is the one that writes the output and prints: rank 0."""
    return rank() == 0


def is_launched() -> bool:
    """Whether torchrun, or `launch`, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextlib.contextmanager
def joined(explain: Callable[[BaseException], tuple[int, str]]) -> Iterator[None]:
    """Make this process part of the job that the launcher started, if any, while the block runs; all leave together.

    Only one process reports an error: rank 0, if it fails too.

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
    stream = sys.stderr  # kept, because stderr may later be redirected to hide messages of libraries
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
    """Connect to all other processes, and return torch's store, which all processes share."""
    from torch.distributed.rendezvous import rendezvous

    try:
        store = next(rendezvous("env://", timeout=START))[0]
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store.set(f"here {number}", "")
        store.wait([f"here {other}" for other in range(size)], START)
    except (RuntimeError, OSError, ValueError) as error:
        text = first_line(error)
        if not _TIMED_OUT.search(text):  # such as a port in use or an unknown host
            raise InputError(f"cannot connect to the other processes at MASTER_ADDR and MASTER_PORT: {text}") from error
        minutes = START.total_seconds() / 60
        text = f"not all processes of this job connected within {minutes:.0f} minutes ({text})"
        raise ResourceError(f"{text}; {RESUME}") from error
    store.set_timeout(_PATIENCE)
    return store


def _open_groups(number: int, size: int) -> None:
    # Not torch's default group: libraries that find one start collectives that the other processes do not join.
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    _groups["cpu"] = ProcessGroupGloo(PrefixStore("gloo", _store), number, size, _PATIENCE)
    if _use_gpu(int(os.environ.get("LOCAL_RANK", number))):
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        _groups["cuda"] = ProcessGroupNCCL(PrefixStore("nccl", _store), number, size, options)


def _use_gpu(local: int) -> bool:
    """Make the GPU with this index current; return False on a machine without GPUs."""
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
    """Return 0 to the first call in any process, then 1, and so on; no two calls get the same number."""
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
    """Whether this is the first process of the job to report an error; later calls return False."""
    try:
        return _store is None or next_number("failed") == 0
    except RuntimeError:  # the process with the store is gone, so one of the others must report the error
        return os.environ["RANK"] in ("0", "1")


def _fail(error: BaseException, code: int, text: str, stream: TextIO) -> None:
    """Exit with `code`; report the error first, unless another process has reported one.

    Rank 0 returns instead if it is the first to fail and has not lost contact: its caller then reports the error.
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
        time.sleep(_BEING_ENDED)  # so that the exit code of the process that failed is that of the job
    os._exit(code)


def _say(text: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        stream.write(f"error: {text}\n")
        stream.flush()


def launch(nproc: int, command: Sequence[str]) -> int:
    """Run a command in several processes on this machine with torch's launcher, and return the exit code of the job.

    Processes report their own errors; `launch` reports a process that was killed.

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
    logging.disable(logging.CRITICAL)  # torch's message about a failure fills a page
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
