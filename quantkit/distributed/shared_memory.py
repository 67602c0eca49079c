"""Tensors between the processes of one machine, through memory that all of them map: one copy in, none out.

A socket to the same machine copies four times. Who may see the memory is decided by the system: it has no name, and
others open it by way of the process that made it, which only the same user may. It is gone with its processes.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Gather = Callable[[Any], list[Any]]
"""What each process has, in every process, in their order."""

_ALIGNED = 64  # bytes: where a tensor begins


class Layout(NamedTuple):
    """How a tensor lies in memory, which the order of a sum over it may follow."""

    dtype: "torch.dtype"
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: "torch.Tensor") -> "Layout":
        """Of this one."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def length(self) -> int:
        """Elements from the first to the last, what lies between them included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Of all these."""
        return self.length * self.dtype.itemsize

    def row(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A tensor that lies so, as the bytes from its first element to its last."""
        import torch

        return tensor.as_strided((self.length,), (1,)).view(torch.uint8)

    def tensor(self, row: "torch.Tensor") -> "torch.Tensor":
        """Inverse of `row`; shares its memory."""
        return row.view(self.dtype).as_strided(self.shape, self.strides)


class _Slot(NamedTuple):
    """Of a tensor in the memory of a process."""

    start: int
    layout: Layout


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
        own, mark, others = -1, secrets.token_bytes(16), list[int]()
        with suppress(OSError, AttributeError):  # of an older system
            own = os.memfd_create("quantkit")
            os.write(own, mark)
        processes = tell((_machine(), os.getpid(), own, mark))
        with suppress(OSError):
            if own >= 0 and len({machine for machine, *_ in processes}) == 1:
                others += [os.open(f"/proc/{process}/fd/{file}", os.O_RDWR) for _, process, file, _ in processes]
        # Machines cloned from one may have all but the mark alike.
        marks = [os.pread(file, len(mark), 0) for file in others]
        if all(tell(marks == [mark for *_, mark in processes])):
            return cls(number, own, others, tell)
        for file in (*others, *[own] * (own >= 0)):
            os.close(file)
        return None

    def exchange(self, outgoing: "Sequence[Mapping[Any, torch.Tensor]]") -> "list[Mapping[Any, torch.Tensor]]":
        """See `collectives.exchange`; what comes from others is overwritten by the next one."""
        self._tell(None)  # by now all have taken in what they were shown the last time
        self._is_used = True
        start = 0
        shown: dict[int, tuple[_Slot, torch.Tensor]] = {}  # by identity: what is for several is there once
        header: list[dict[Any, _Slot]] = [{} for _ in outgoing]
        for to, named in enumerate(outgoing):
            for name, x in named.items() if to != self._number else ():
                if id(x) not in shown:
                    shown[id(x)] = _Slot(start, layout := Layout.of(x)), x
                    start += -(-layout.nbytes // _ALIGNED) * _ALIGNED
                header[to][name] = shown[id(x)][0]
        if start > os.fstat(self._own).st_size:
            os.ftruncate(self._own, start)
        for slot, x in shown.values():
            self._row(self._number, slot).copy_(slot.layout.row(x))
        headers: list[list[dict[Any, _Slot]]] = self._tell(header)  # by now all have written
        incoming: list[Mapping[Any, torch.Tensor]] = [
            {name: slot.layout.tensor(self._row(source, slot)) for name, slot in slots[self._number].items()}
            for source, slots in enumerate(headers)
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

    def _row(self, source: int, slot: _Slot) -> "torch.Tensor":
        import torch

        if not (count := slot.layout.nbytes):
            return torch.empty(0, dtype=torch.uint8)
        known = self._maps.get(source)
        if known is None or len(known) < slot.start + count:
            known = self._maps[source] = mmap.mmap(self._files[source], 0)  # tensors of the one before keep that one
        return torch.frombuffer(known, dtype=torch.uint8, count=count, offset=slot.start)

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
