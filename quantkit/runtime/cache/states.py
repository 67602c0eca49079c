"""States of one recurrent layer: a row for each sequence that runs, as it is after the tokens computed so far."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.models.state_shape import StateShape


class StatePool:
    """Rows by `ForwardBatch.residual_rows`, whose rules hold here too. *Mutable*.

    Tokens cannot be taken back: what a step has added stays. A row needs no clearing, as a sequence that begins reads
    nothing.

    Args:
        shape: of one layer's state.
        num_rows: sequences that run at once.
        device: where it lives.
    """

    def __init__(self, shape: StateShape, num_rows: int, device: torch.device) -> None:
        sizes = (shape.conv_width - 1, shape.channels), (shape.value_heads, shape.key_dim, shape.value_dim)
        self._pools = [torch.zeros(num_rows, *size, dtype=torch.float32, device=device) for size in sizes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(pool.nbytes for pool in self._pools)

    def read(self, run: "Run") -> tuple[Tensor, Tensor]:
        """Past tokens of the convolution (B, W - 1, C), and states (B, H, N, P); zeros for sequences that begin."""
        if run.begins:
            past, state = (pool.new_zeros(len(run.rows), *pool.shape[1:]) for pool in self._pools)
        else:
            past, state = (pool[run.rows] for pool in self._pools)
        return past, state

    def write(self, run: "Run", past: Tensor, state: Tensor) -> None:
        """Keep what `read` will give next time."""
        for pool, values in zip(self._pools, (past, state), strict=True):
            pool[run.rows] = values


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring sequences of a batch with equally many new tokens.

    Args:
        tokens: where these are among all new tokens.
        rows: (B,) of the state pools.
        begins: nothing of these sequences has been computed.
    """

    tokens: slice
    rows: Tensor
    begins: bool


def runs(batch: ForwardBatch) -> Iterator[Run]:
    """A batch as runs: all decodes are one, as is each chunk of a prompt."""
    start = row = 0
    lengths = zip(batch.query_lengths, batch.context_lengths, strict=True)
    for (length, begins), members in groupby((new, new == context) for new, context in lengths):
        count = len(list(members))
        stop = start + count * length
        yield Run(tokens=slice(start, stop), rows=batch.residual_rows[row : row + count], begins=begins)
        start, row = stop, row + count
