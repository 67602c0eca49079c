"""Which process of its job this one is, and the time during which it is one."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from quantkit.distributed.lifeline import RESUME, START, Lifeline
from quantkit.distributed.shared_memory import Gather, SharedMemory
from quantkit.errors import InputError, ResourceError, first_line

# Deaths are noticed at once; waiting is no sign of one, since a writer may be busy for hours with what it alone can do.
_PATIENCE = timedelta(days=7)
# Torch has no class of errors for it.
_TIMED_OUT = re.compile("timed out|time-?out", re.IGNORECASE)

_lifeline: Lifeline | None = None
_groups: dict[str, Any] = {}  # by type of device
_store: Any = None  # torch's, that all processes have
_memory: list[SharedMemory | None] = []  # one, once it has been asked for


def rank() -> int:
    """Number of this process in its job."""
    return 0 if _lifeline is None else _lifeline.rank


def world() -> int:
    """How many processes do this job."""
    return 1 if _lifeline is None else _lifeline.world


def is_writer() -> bool:
    """Whether this is the process that writes the output, prints and asks for more."""
    return rank() == 0


@contextlib.contextmanager
def joined(explain: Callable[[BaseException], tuple[int, str]]) -> Iterator[None]:
    """While open, this process is one of those that torchrun has started, if it has; when one ends badly, all do.

    An error is told by the first process alone, and ends all of them with its exit code; so does a death, with that of
    a ResourceError.

    Args:
        explain: exit code and one line for an error.
    """
    global _lifeline, _store
    if not is_launched() or _lifeline is not None:
        yield
        return
    line = Lifeline(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    line.watch_launcher()
    try:
        _store = _meet(line)  # from here on nobody waits for one that dies
        _open_groups(_store, line.rank, line.world)
        _lifeline = line
        yield
        line.leave()
    except BaseException as error:
        line.fail(*explain(error))
        raise
    finally:
        _lifeline = _store = None
        _groups.clear()
        if _memory and (memory := _memory.pop()):
            memory.close()


def _meet(line: Lifeline) -> Any:
    """Connect with all other processes; a store of torch's that all have."""
    from torch.distributed.rendezvous import rendezvous

    try:
        # No default group of torch's: libraries that see one talk to their own kind in all processes, who are away.
        store = next(rendezvous("env://", timeout=START))[0]
        line.connect(store)
    except (RuntimeError, OSError, ValueError) as error:
        text = first_line(error)
        if not _TIMED_OUT.search(text):  # a port in use, a host that nobody knows
            raise InputError(f"the processes cannot meet by MASTER_ADDR and MASTER_PORT: {text}") from error
        minutes = START.total_seconds() / 60
        text = f"not all processes of this job came together within {minutes:.0f} minutes ({text})"
        raise ResourceError(f"{text}; {RESUME}") from error
    store.set_timeout(_PATIENCE)
    return store


def group(device_type: str) -> Any:
    """What tensors on such a device travel by: a backend of torch's."""
    return _groups[device_type]


def shared_memory(tell: Gather) -> SharedMemory | None:
    """What the processes of this job show each other tensors by, opened by all at once; None: not all are neighbours.

    Args:
        tell: see `Gather`.
    """
    if not _memory:
        _memory.append(SharedMemory.open(rank(), tell))
    return _memory[0]


def forget_shared_memory() -> None:
    """Give back what `shared_memory` has taken, in all processes at once."""
    if _memory and _memory[0]:
        _memory[0].forget()


def next_number(name: str) -> int:
    """0 for who asks first of all processes, then 1, and so on; no two of them get the same."""
    return int(_store.add(name, 1)) - 1


def _open_groups(store: Any, number: int, size: int) -> None:
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    _groups["cpu"] = ProcessGroupGloo(PrefixStore("gloo", store), number, size, _PATIENCE)
    if _use_gpu(int(os.environ.get("LOCAL_RANK", number))):
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        _groups["cuda"] = ProcessGroupNCCL(PrefixStore("nccl", store), number, size, options)


def _use_gpu(local: int) -> bool:
    """Make the GPU of this number the current one; False where there are none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return False
    if local >= count:
        raise InputError(
            f"process {local} of this machine has no GPU of its own: {count} found; start at most {count}, or set "
            "CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    torch.cuda.set_device(local)
    return True


def is_launched() -> bool:
    """Whether torchrun, or `launch`, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
