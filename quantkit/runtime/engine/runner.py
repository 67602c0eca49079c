"""Builds the tensors of a step and runs the model on them.

At batch 1 a step of a small model takes a few hundred microseconds, so nothing here is built element by element: the
numbers are written into arrays that live as long as the engine, and the tensors of a CPU batch are views of them. A
batch is therefore valid until the next one is built. To other devices they go in one copy that nobody waits for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.transfer import send
from quantkit.kernels.types import Logits
from quantkit.runtime.engine.decode_graphs import DecodeGraphs, why_not
from quantkit.runtime.model.model import NativeModel

if TYPE_CHECKING:
    from quantkit.runtime.cache.kv_cache import KVCache
    from quantkit.runtime.model.model import Model

Array = np.ndarray[Any, Any]


class PageHolder(Protocol):
    """What has pages: a sequence, or its shadow in a draft model."""

    id: int
    pages: list[int]
    row: int
    tabled: int


class Piece(NamedTuple):
    """New tokens of one sequence.

    Args:
        holder: whose.
        tokens: to feed, at least one.
        start: position of the first.
        num_logits: logits wanted after so many of the last tokens.
    """

    holder: PageHolder
    tokens: list[int]
    start: int
    num_logits: int


class _Buffer:
    """An array, and tensors over the beginning of the same memory."""

    def __init__(self, count: int, dtype: Any) -> None:
        self.array: Array = np.zeros(count, dtype=dtype)
        self._tensor = torch.from_numpy(self.array)
        self._view = self._tensor[:0]
        self._count = 0

    def first(self, count: int) -> Tensor:
        """The first entries; decode steps ask for the same number again and again, and get the same view."""
        if count != self._count:
            self._view, self._count = self._tensor[:count], count
        return self._view


class BatchBuilder:
    """Turns pieces into a ForwardBatch.

    Args:
        max_sequences: rows of the page table.
        max_pages: of one sequence.
        page_size: tokens per page.
        device: of the model.
    """

    def __init__(self, *, max_sequences: int, max_pages: int, page_size: int, device: torch.device | str) -> None:
        self._page_size = page_size
        self._device = torch.device(device)
        self._table = np.full((max_sequences, max_pages), -1, dtype=np.int32)
        self._starts = _Buffer(max_sequences + 1, np.int32)
        self._rows = _Buffer(max_sequences, np.int64)
        self._reserve(4 * max_sequences)

    def build(self, pieces: Sequence[Piece]) -> ForwardBatch:
        """The batch of these pieces; valid until the next call."""
        total = sum(len(piece.tokens) for piece in pieces)
        if total > len(self._tokens.array):
            self._reserve(2 * total)
        starts, rows, logits = self._starts.array, self._rows.array, self._logits.array
        at = num_logits = 0
        longest = 1
        for index, piece in enumerate(pieces):
            holder, count = piece.holder, len(piece.tokens)
            if holder.tabled != len(holder.pages):
                self._tabulate(holder)
            self._fill(piece, at)
            starts[index] = at
            rows[index] = holder.row
            at += count
            longest = max(longest, piece.start + count)
            for row in range(at - piece.num_logits, at):
                logits[num_logits] = row
                num_logits += 1
        starts[len(pieces)] = at
        tokens, positions, slots, tails, wanted, begins, table = self._send(
            (self._tokens, at),
            (self._positions, at),
            (self._slots, at),
            (self._rows, len(pieces)),
            (self._logits, num_logits),
            (self._starts, len(pieces) + 1),
            table=self._rows_of(pieces, -(-longest // self._page_size)),
        )
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            query_starts=begins,
            page_table=table,
            slots=slots,
            residual_rows=tails,
            logit_rows=wanted,
            query_lengths=tuple([len(piece.tokens) for piece in pieces]),
            context_lengths=tuple([piece.start + len(piece.tokens) for piece in pieces]),
            sequence_ids=tuple([piece.holder.id for piece in pieces]),
        )

    def _send(self, *parts: tuple[_Buffer, int], table: Array) -> tuple[Tensor, ...]:
        """The first entries of buffers, and a page table, on the device: views on the CPU, else one copy."""
        if self._device.type == "cpu":
            return (*[buffer.first(count) for buffer, count in parts], torch.from_numpy(table))
        return send(self._device, *[buffer.array[:count] for buffer, count in parts], table)

    def _fill(self, piece: Piece, at: int) -> None:
        """Write tokens, positions and slots of one piece."""
        pages, start, size = piece.holder.pages, piece.start, self._page_size
        if len(piece.tokens) == 1:
            self._tokens.array[at] = piece.tokens[0]
            self._positions.array[at] = start
            self._slots.array[at] = pages[start // size] * size + start % size
            return
        end = at + len(piece.tokens)
        positions = np.arange(start, start + len(piece.tokens))
        self._tokens.array[at:end] = piece.tokens
        self._positions.array[at:end] = positions
        page = self._table[piece.holder.row, positions // size].astype(np.int64)
        self._slots.array[at:end] = page * size + positions % size

    def _tabulate(self, holder: PageHolder) -> None:
        """Bring the holder's row of the page table up to date; a row just given out still shows its last owner."""
        row, known = self._table[holder.row], holder.tabled
        if known == 0 or known > len(holder.pages):
            row.fill(-1)
            known = 0
        row[known : len(holder.pages)] = holder.pages[known:]
        holder.tabled = len(holder.pages)

    def table_of(self, pieces: Sequence[Piece], width: int) -> Array:
        """(len(pieces), width) int32, the first pages of each; valid until the next call."""
        for piece in pieces:
            if piece.holder.tabled != len(piece.holder.pages):
                self._tabulate(piece.holder)
        return self._rows_of(pieces, width)

    def _rows_of(self, pieces: Sequence[Piece], width: int) -> Array:
        if len(pieces) == 1:
            row = pieces[0].holder.row
            return self._table[row : row + 1, :width]
        return self._table[[piece.holder.row for piece in pieces], :width]

    def _reserve(self, count: int) -> None:
        """Room for so many new tokens in a step."""
        self._tokens, self._positions, self._slots, self._logits = (_Buffer(count, np.int64) for _ in range(4))


class Reading:
    """Tokens on their way to the host: `read` waits for them, and for nothing that was launched later.

    Args:
        tokens: (R,) int64, on any device.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)  # the next step may write over them
        self._arrived = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[int]:
        """The tokens."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[int] = self._host.tolist()
        return found


class Runner:
    """A model, its cache, and the buffers of its batches.

    On a CUDA device decode steps are captured as graphs if they can be; `QUANTKIT_CUDA_GRAPHS=0` switches that off.

    Args:
        model: to run.
        cache: its keys and values; None when the model keeps its own.
        max_sequences: in one batch.
        max_pages: of one sequence.
        page_size: tokens per page.
        device: of the model.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache | None,
        *,
        max_sequences: int,
        max_pages: int,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        self.model = model
        self.cache = cache
        self._builder = BatchBuilder(
            max_sequences=max_sequences, max_pages=max_pages, page_size=page_size, device=device
        )
        self._graphs: DecodeGraphs | None = None
        self._no_graphs: str | None = None
        if torch.device(device).type != "cuda" or not isinstance(model, NativeModel) or cache is None:
            return
        self._no_graphs = _switched_off() or why_not(model, cache, max_pages * page_size)
        if self._no_graphs is None:
            self._graphs = DecodeGraphs(model, cache, self._builder, max_sequences=max_sequences, max_pages=max_pages)

    @property
    def graph_status(self) -> str | None:
        """Whether decode steps are CUDA graphs, for users; None where that is no question."""
        if self._graphs is None:
            return None if self._no_graphs is None else f"no: {self._no_graphs}"
        return "yes" if self._graphs.failure is None else f"no: {self._graphs.failure}"

    def run(self, pieces: Sequence[Piece], tokens: Tensor | None = None) -> Tensor:
        """`step` for who wants (R, V) float32 logits only."""
        return self.step(pieces, tokens).values

    def step(self, pieces: Sequence[Piece], tokens: Tensor | None = None) -> Logits:
        """Logits, the rows of each piece in order. For callers in inference mode.

        Args:
            pieces: of the batch.
            tokens: (T,) int64 on the device, the new tokens if the host does not know them yet; None = in the pieces.
        Returns:
            logits, valid until the next call.
        """
        if self._graphs is not None:
            found = self._graphs.run(pieces, tokens)
            if found is not None:
                return found
        batch = self._builder.build(pieces)
        if tokens is not None:
            batch = replace(batch, token_ids=tokens)
        if isinstance(self.model, NativeModel):
            return self.model.step(batch, self.cache)
        return Logits(self.model.forward(batch, self.cache))


def _switched_off() -> str | None:
    return "QUANTKIT_CUDA_GRAPHS=0" if os.environ.get("QUANTKIT_CUDA_GRAPHS", "1") == "0" else None
