"""Exchange data between the processes of a job: with NCCL for tensors on a GPU, with gloo for everything else."""

import io
import itertools
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quantkit.distributed.job import group, lost_contact, next_number, rank, world

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K", bound=Hashable)

_TOLD_AT_ONCE = 32  # number of results of shared work that are gathered together
_PADDED_AT_MOST = 1 << 16  # bytes: values up to this size are padded to the longest, so that one call gathers all
_ALIGNED = 16  # bytes: alignment of each tensor when tensors are sent as one row of bytes


class Layout(NamedTuple):
    """Layout of a tensor in memory; the order in which torch sums the tensor may depend on it."""

    dtype: "torch.dtype"
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: "torch.Tensor") -> "Layout":
        """Return the layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def length(self) -> int:
        """Number of elements in memory from the tensor's first to its last, including unused elements in between."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Size in bytes of `length` elements."""
        return self.length * self.dtype.itemsize

    def row(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the bytes of a tensor of this layout, from its first element to its last."""
        import torch

        return tensor.as_strided((self.length,), (1,)).view(torch.uint8)

    def tensor(self, row: "torch.Tensor") -> "torch.Tensor":
        """Inverse of `row`: return a tensor of this layout that shares the memory of `row`."""
        return row.view(self.dtype).as_strided(self.shape, self.strides)


def barrier() -> None:
    """Wait until every process has called this function."""
    gather(None)


def broadcast(value: T, source: int = 0) -> T:
    """Return, in every process, the value that process `source` gave; the values of other processes are ignored."""
    if world() == 1:
        return value
    import torch

    packed = _packed(value) if rank() == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(packed)])
    fill(size, source)
    if rank() == source:
        fill(packed, source)
        return value
    packed = torch.empty(int(size), dtype=torch.uint8)
    fill(packed, source)
    received: T = _unpacked(packed)
    return received


def gather(value: T) -> list[T]:
    """Return, in every process, the values of all processes in order of rank."""
    if world() == 1:
        return [value]
    import torch

    packed = _packed(value)
    sizes = [int(size) for size in _gathered(torch.tensor([len(packed)]))]
    if (largest := max(sizes)) <= _PADDED_AT_MOST:
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(packed)] = packed
        parts = [part[:size] for size, part in zip(sizes, _gathered(padded), strict=True)]
        return [value if number == rank() else _unpacked(part) for number, part in enumerate(parts)]
    values = list[T]()
    for source, size in enumerate(sizes):
        part = packed if source == rank() else torch.empty(size, dtype=torch.uint8)
        fill(part, source)
        values.append(value if source == rank() else _unpacked(part))
    return values


def _gathered(tensor: "torch.Tensor") -> "list[torch.Tensor]":
    """Return the CPU tensors of all processes in order of rank; all must have the same shape and dtype."""
    import torch

    gathered = [torch.empty_like(tensor) for _ in range(world())]
    with lost_contact():
        group("cpu").allgather([gathered], [tensor]).wait()
    return gathered


def fill(tensor: "torch.Tensor", source: int) -> None:
    """Overwrite a contiguous tensor with the contents of the corresponding tensor in process `source`."""
    if world() == 1:
        return
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    with lost_contact():
        group(tensor.device.type).broadcast([tensor], options).wait()


def _packed(value: Any) -> "torch.Tensor":
    import torch

    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: "torch.Tensor") -> Any:
    """Unpack a value from another process of this job; tensors that were on a GPU go to this process's GPU."""
    return pickle.loads(packed.numpy().data)  # trusted, because a process of the same job packed it


class _Pickler(pickle.Pickler):
    """Pickler that writes only the bytes of a tensor. Torch would write the whole storage that the tensor is a view of,
    and the index of the tensor's GPU.
    """

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor:
            return NotImplemented
        layout = Layout.of(value)
        return _tensor, (layout, pickle.PickleBuffer(layout.row(value.detach()).cpu().numpy().data), value.is_cuda)


def _tensor(layout: Layout, data: bytearray, is_on_gpu: bool) -> "torch.Tensor":
    import torch

    row = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return layout.tensor(row.cuda() if is_on_gpu else row)  # to this process's current GPU


def share_out(
    items: Sequence[S], compute: Callable[[S], T], costs: Sequence[float] = (), owners: Sequence[int] = ()
) -> list[T]:
    """Divide items among the processes, compute a result for each item, and return all results in every process.

    Args:
        items: all items; must be the same in every process.
        compute: function that computes the result of one item. It may use collectives only if `owners` is given and
            every process calls the collectives in the same order.
        costs: estimated cost of each item, by which the items are divided, see `assign_work`.
        owners: rank of the process that computes each item. Without `costs` and `owners`, each process takes the next
            item when it is free.
    """
    if world() == 1:
        return [compute(item) for item in items]
    owners = owners or (assign_work(costs) if costs else ())
    taken = (number for number, owner in enumerate(owners) if owner == rank()) if owners else _free(len(items))
    own = {number: compute(items[number]) for number in taken}
    results: dict[int, T] = {}
    for first in range(0, len(items), _TOLD_AT_ONCE):
        window = range(first, first + _TOLD_AT_ONCE)
        for part in gather({number: own.pop(number) for number in window if number in own}):
            results |= part
    return [results[number] for number in range(len(items))]


_asked = itertools.count()  # number of calls of `_free`, which is the same in all processes


def _free(count: int) -> Iterator[int]:
    """Yield the numbers below `count`, in order, that no other process has taken yet."""
    name = f"free {next(_asked)}"
    while True:
        with lost_contact():
            number = next_number(name)
        if number >= count:
            return
        yield number


def assign_work(costs: Sequence[float]) -> list[int]:
    """Return, for each item of work, the rank of the process that computes it. Processes need not communicate for this.

    Items are assigned in order of falling cost, each to the process with the lowest total cost so far.
    """
    loads = [0.0] * world()
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def exchange(
    outgoing: "Sequence[Mapping[K, torch.Tensor]]", device: "torch.device"
) -> "list[Mapping[K, torch.Tensor]]":
    """Send tensors to each process, and return the tensors that each process sent to this one.

    Args:
        outgoing: for each process, the tensors to send to it, keyed by name; the entry of this process is returned
            unchanged.
        device: device of all tensors.
    """
    if world() == 1:
        return list(outgoing)
    headers = gather([{name: Layout.of(x) for name, x in named.items()} for named in outgoing])
    incoming: list[Mapping[K, torch.Tensor]] = [{} for _ in range(world())]
    incoming[rank()] = outgoing[rank()]
    for step in range(1, world()):
        to, source = (rank() + step) % world(), (rank() - step) % world()
        incoming[source] = _swapped(outgoing[to], to, headers[source][rank()], source, device)
    return incoming


def _swapped(
    named: "Mapping[K, torch.Tensor]", to: int, header: Mapping[K, Layout], source: int, device: "torch.device"
) -> "dict[K, torch.Tensor]":
    """Send tensors to process `to` and receive tensors from process `source`, in each direction as one row of bytes."""
    import torch

    sizes = [_padded(layout.nbytes) for layout in header.values()]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    rows = [Layout.of(x).row(x) for x in named.values()]
    sent = torch.zeros(sum(_padded(len(row)) for row in rows), dtype=torch.uint8, device=device)
    start = 0
    for row in rows:
        sent[start : start + len(row)] = row
        start += _padded(len(row))
    travels = group(device.type)
    todo = [(travels.send, sent, to), (travels.recv, received, source)]
    with lost_contact():
        # NCCL runs the operations of a pair of processes in order, so one of the two must receive first.
        works = [move([data], peer, 0) for move, data, peer in (todo if rank() < to else todo[::-1]) if len(data)]
        for work in works:
            work.wait()
    parts = torch.split(received, sizes)
    return {
        name: layout.tensor(part[: layout.nbytes]) for part, (name, layout) in zip(parts, header.items(), strict=True)
    }


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
