"""Inputs of linears on their way to those who sum them: with several processes each runs other batches of the data.

Not partial sums travel but what is summed: whoever has a statistic takes in every batch in the order of the data, so
its bits are those of one process, for any number of them, and memory holds no second copy of it. Alone nothing travels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from quantkit.compress.calibration.activations import ActivationStore
from quantkit.distributed import exchange, rank, world

Handler = Callable[[str, Tensor], None]
"""Takes the rows (T, K) that a linear, by its name, was called with."""


class Deliveries:
    """Rows of one batch of each process at a time.

    Args:
        handlers: by what the rows are; called in the order of the batches, of one batch in that of `send`.
        recipients: processes that want the rows of a linear.
        device: of all rows.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], recipients: Callable[[str], Iterable[int]], device: torch.device
    ) -> None:
        self._handlers, self._recipients, self._device = handlers, recipients, device
        self._waiting: list[dict[tuple[int, str, str], Tensor]] = [{} for _ in range(world())]
        self._count = 0

    def send(self, kind: str, name: str, rows: Tensor) -> None:
        """Have the handler of a kind called with these rows, at the latest by `deliver`."""
        if world() == 1:
            self._handlers[kind](name, rows)
            return
        rows = rows.clone()  # the layer may change in place what it has shown
        self._count += 1
        for to in self._recipients(name):
            self._waiting[to][self._count, kind, name] = rows

    def deliver(self) -> None:
        """Once each process has run its batch, or had none left: all take in what is for them."""
        if world() == 1:
            return
        for rows in exchange(self._waiting, self._device):
            for (_, kind, name), values in rows.items():
                self._handlers[kind](name, values)
        self._waiting = [{} for _ in range(world())]


def own_turns(store: ActivationStore) -> Iterator[int | None]:
    """Number of the batch that this process runs in each turn of all processes, or None where none is left for it."""
    for first in range(0, len(store), world()):
        number = first + rank()
        yield number if number < len(store) else None
