"""Tensors between the processes of one machine, through memory that all of them map: one copy in, none out.

A socket to the same machine copies four times. Who may see the memory is decided by the system: it has no name, and
others open it by way of the process that made it, which only the same user may. It is gone with its processes.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Gather = Callable[[Any], list[Any]]
"""What each process has, in every process, in their order."""

_ALIGNED = 64  # bytes: where a tensor begins


class _Slot(NamedTuple):
    """Of a tensor in the memory of a process."""

    start: int
    shape: tuple[int, ...]
    dtype: "torch.dtype"


class SharedMemory:
    """What each process of a job shows the others. *Mutable*.

    Args:
        number: of this process.
        own: file of this one.
        others: files by process, with its own.
        tell: see `Gather`.
    """

    def __init__(self, number: int, own: int, others: Sequence[int], tell: Gather) -> None:
        self._number, self._own, self._files, self._tell = number, own, others, tell
        self._maps: dict[int, mmap.mmap] = {}
        self._is_used = False  # in all processes alike

    @classmethod
    def open(cls, number: int, tell: Gather) -> "SharedMemory | None":
        """In all processes at once; None, in all of them, where one cannot see the memory of another."""
        own = os.memfd_create("quantkit") if hasattr(os, "memfd_create") else -1
        others: list[int] = []
        processes = tell((_machine(), os.getpid(), own))
        with suppress(OSError):
            if own >= 0 and len({machine for machine, _, _ in processes}) == 1:
                others += [os.open(f"/proc/{process}/fd/{file}", os.O_RDWR) for _, process, file in processes]
        if all(tell(len(others) == len(processes))):
            return cls(number, own, others, tell)
        for file in (*others, *[own] * (own >= 0)):
            os.close(file)
        return None

    def exchange(self, outgoing: "Sequence[Mapping[Any, torch.Tensor]]") -> "list[Mapping[Any, torch.Tensor]]":
        """See `collectives.exchange`; what comes from others is overwritten by the next one."""
        self._tell(None)  # by now all have taken in what they were shown the last time
        self._is_used = True
        start = 0
        header: list[dict[Any, _Slot]] = [{} for _ in outgoing]
        for to, named in enumerate(outgoing):
            for name, x in named.items() if to != self._number else ():
                header[to][name] = _Slot(start, tuple(x.shape), x.dtype)
                start += -(-x.nbytes // _ALIGNED) * _ALIGNED
        if start > os.fstat(self._own).st_size:
            os.ftruncate(self._own, start)
        for named, slots in zip(outgoing, header, strict=True):
            for name, slot in slots.items():
                self._view(self._number, slot).copy_(named[name])
        headers: list[list[dict[Any, _Slot]]] = self._tell(header)  # by now all have written
        incoming: list[Mapping[Any, torch.Tensor]] = [
            {name: self._view(source, slot) for name, slot in shown[self._number].items()}
            for source, shown in enumerate(headers)
        ]
        incoming[self._number] = outgoing[self._number]
        return incoming

    def forget(self) -> None:
        """Give the memory back, in all processes at once; to read what came through it ends the process that does."""
        if not self._is_used:
            return
        self._tell(None)  # by now all have taken in what they were shown
        self._is_used = False
        self._maps.clear()
        os.ftruncate(self._own, 0)

    def _view(self, source: int, slot: _Slot) -> "torch.Tensor":
        import torch

        count = torch.Size(slot.shape).numel()
        if not count:
            return torch.empty(slot.shape, dtype=slot.dtype)
        known = self._maps.get(source)
        if known is None or len(known) < slot.start + count * slot.dtype.itemsize:
            known = self._maps[source] = mmap.mmap(self._files[source], 0)  # tensors of the one before keep that one
        return torch.frombuffer(known, dtype=slot.dtype, count=count, offset=slot.start).view(slot.shape)

    def close(self) -> None:
        """Let go of it; tensors that came through it stay readable."""
        self._maps.clear()
        for file in (self._own, *self._files):
            os.close(file)


def _machine() -> str:
    """Of processes whose numbers mean the same."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    return ""
