"""The newest queries of each sequence in one layer, for policies that ask which keys they attend to."""

import torch
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import KVLayout
from quantkit.kernels.types import AttentionOptions


class NewestQueries:
    """A ring of queries for each sequence that runs, by position in its text. *Mutable*: attention writes it.

    Rows are those of `ForwardBatch.residual_rows`. There is room for drafts that are taken back.

    Args:
        layout: of the layer; says how many.
        num_rows: sequences that run at once.
        device: where it lives.
    """

    def __init__(self, layout: KVLayout, num_rows: int, device: torch.device) -> None:
        shape = num_rows, layout.observed_tokens, layout.observed_heads, layout.head_dim
        self._ring = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.scale = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self._ring.nbytes

    def __call__(self, query: Tensor, batch: ForwardBatch, options: AttentionOptions) -> None:
        """Keep the queries (T, Hq, D) of a step, rotated."""
        self.scale, size = options.scale, self._ring.shape[1]
        positions, start = batch.in_text()[0], 0
        for row, count in zip(batch.residual_rows, batch.query_lengths, strict=True):
            new = slice(max(start, start + count - size), start + count)
            self._ring[row, positions[new] % size] = query[new].to(self._ring.dtype)
            start += count

    def read(self, row: int, positions: range) -> Tensor:
        """(len(positions), Hq, D) float32 of positions that are new enough."""
        slots = torch.arange(positions.start, positions.stop, device=self._ring.device) % self._ring.shape[1]
        return self._ring[row, slots].float()
