"""Construction of a step's tensors from its scheduled chunks.

At batch size 1, a step of a small model takes only a few hundred microseconds, so tensors are not built element by
element. The builder writes into arrays that live as long as the engine; the tensors of a CPU batch are views of them. A
batch is therefore valid until the next one is built. For other devices, one asynchronous copy transfers the batch.
"""

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.transfer import send
from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.sequence import PageHolder, Sequence

Array = np.ndarray[Any, Any]

_TABLE_STEP = 16


def table_width(num_pages: int) -> int:
    """Return the number of columns of a page table on a GPU: `num_pages`, rounded up to a multiple of 16.

    Triton would compile each kernel again for a stride that is not a multiple of 16.
    """
    return -(-num_pages // _TABLE_STEP) * _TABLE_STEP


class ScheduledChunk(NamedTuple):
    """New tokens of one sequence in a step.

    Args:
        holder: sequence that the tokens belong to.
        tokens: token ids to compute, at least one.
        start: position of the first token in the sequence.
        num_logits: number of last tokens whose logits the step returns.
    """

    holder: PageHolder
    tokens: list[int]
    start: int
    num_logits: int


def is_decode_step(chunks: Many[ScheduledChunk]) -> bool:
    """Whether every chunk consists of one token whose logits are needed."""
    return all(len(chunk.tokens) == 1 == chunk.num_logits for chunk in chunks)


def last_rows(chunks: list[ScheduledChunk], counts: list[int]) -> list[int]:
    """Return the indices of the last rows of each chunk, as rows of the logits of all chunks together.

    Args:
        chunks: chunks of the step.
        counts: number of last rows of each chunk.
    """
    ends = accumulate(chunk.num_logits for chunk in chunks)
    return [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]


def following_tokens(work: tuple[Sequence, int], chosen: list[int]) -> list[int]:
    """Return the token that follows each token of a sequence's chunk, except the rejected drafts.

    Call this before the chosen tokens are appended to the sequence. After a prompt that is only scored, no token is
    chosen; token 0 then stands for the missing token.

    Args:
        work: the sequence, and the number of tokens of its chunk.
        chosen: the chosen tokens.
    """
    sequence, count = work
    known = sequence.ids[sequence.num_computed + 1 : sequence.num_computed + count + 1]
    return (known + (chosen or [0]))[:count]


def chunk_of(sequence: Sequence, count: int) -> ScheduledChunk:
    """Return a sequence's chunk in the next step: `count` tokens, which are known tokens and then all drafts."""
    start, end = sequence.num_computed, sequence.num_computed + count
    num_logits = end - max(start, sequence.first_row)
    return ScheduledChunk(sequence, sequence.ids[start:end] + sequence.drafts, start, max(0, num_logits))


class _Buffer:
    """A NumPy array, and tensors that share the beginning of its memory."""

    def __init__(self, count: int, dtype: Any) -> None:
        self.array: Array = np.zeros(count, dtype=dtype)
        self._tensor = torch.from_numpy(self.array)
        self._view = self._tensor[:0]
        self._count = 0

    def first(self, count: int) -> Tensor:
        """Return a view of the first `count` entries. The last view is cached: decode steps repeat the same count."""
        if count != self._count:
            self._view, self._count = self._tensor[:count], count
        return self._view


class BatchBuilder:
    """Builds a ForwardBatch from chunks.

    Args:
        max_sequences: rows of the page table.
        max_pages: maximum number of pages of one sequence.
        page_size: tokens per page.
        device: device of the model.
    """

    def __init__(self, *, max_sequences: int, max_pages: int, page_size: int, device: torch.device | str) -> None:
        self._page_size = page_size
        self._device = torch.device(device)
        self._table = np.full((max_sequences, table_width(max_pages)), -1, dtype=np.int32)
        self._starts = _Buffer(max_sequences + 1, np.int32)
        self._rows = _Buffer(max_sequences, np.int64)
        # Enough for decode steps with a few drafts each; the first prompt makes the buffers grow.
        self._reserve(4 * max_sequences)

    def build(self, chunks: Many[ScheduledChunk]) -> ForwardBatch:
        """Return the batch of these chunks; it is valid until the next call."""
        query_lengths = tuple([len(chunk.tokens) for chunk in chunks])
        evicted = [chunk.holder.num_evicted for chunk in chunks]
        text_lengths = tuple([chunk.start + len(chunk.tokens) for chunk in chunks])
        context_lengths = text_lengths
        if any(evicted):
            context_lengths = tuple([length - gone for length, gone in zip(text_lengths, evicted, strict=True)])
        total, count = sum(query_lengths), len(chunks)
        if total > len(self._tokens.array):
            # More than is needed now, so that prompts of growing length do not allocate in every step.
            self._reserve(2 * total)
        starts, rows, logits = self._starts.array, self._rows.array, self._logits.array
        at = num_logits = 0
        for index, chunk in enumerate(chunks):
            holder = chunk.holder
            if holder.num_table_entries != len(holder.pages):
                self._tabulate(holder)
            self._fill(chunk, at)
            starts[index], rows[index] = at, holder.row
            at += query_lengths[index]
            for row in range(at - chunk.num_logits, at):
                logits[num_logits] = row
                num_logits += 1
        starts[count] = total
        parts = {
            "token_ids": (self._tokens, total),
            "positions": (self._positions, total),
            "slots": (self._slots, total),
            "residual_rows": (self._rows, count),
            "logit_rows": (self._logits, num_logits),
            "query_starts": (self._starts, count + 1),
        }
        if context_lengths is not text_lengths:
            self._text.array[:total] = self._positions.array[:total] + np.repeat(evicted, query_lengths)
            parts["text_positions"] = (self._text, total)
        num_pages = -(-max(context_lengths) // self._page_size)
        if self._device.type == "cpu":  # views, reused as long as the sizes stay the same
            table = self._rows_of(chunks, num_pages)
            tensors = (*[buffer.first(size) for buffer, size in parts.values()], torch.from_numpy(table))
        else:
            table = self._rows_of(chunks, table_width(num_pages))
            tensors = send(self._device, *[buffer.array[:size] for buffer, size in parts.values()], table)
        by_name: dict[str, Any] = dict(zip((*parts, "page_table"), tensors, strict=True))
        return ForwardBatch(
            **by_name,
            query_lengths=query_lengths,
            context_lengths=context_lengths,
            text_lengths=text_lengths,
            sequence_ids=tuple([chunk.holder.id for chunk in chunks]),
            adapters=tuple([chunk.holder.adapter for chunk in chunks]),
        )

    def _fill(self, chunk: ScheduledChunk, at: int) -> None:
        """Write the tokens, positions and slots of one chunk."""
        holder, tokens, start, _ = chunk
        start -= holder.num_evicted
        size, count = self._page_size, len(tokens)
        # The usual case in decode steps: the calls of numpy below cost more than these three assignments.
        if count == 1:
            self._tokens.array[at] = tokens[0]
            self._positions.array[at] = start
            self._slots.array[at] = holder.pages[start // size] * size + start % size
            return
        positions = np.arange(start, start + count)
        self._tokens.array[at : at + count] = tokens
        self._positions.array[at : at + count] = positions
        # A page number times the page size may exceed the 32 bits of the table.
        page = self._table[holder.row, positions // size].astype(np.int64)
        self._slots.array[at : at + count] = page * size + positions % size

    def _tabulate(self, holder: PageHolder) -> None:
        """Update the holder's row of the page table; a newly assigned row may still list its previous owner's pages."""
        row, known = self._table[holder.row], holder.num_table_entries
        if known == 0 or known > len(holder.pages):
            row.fill(-1)
            known = 0
        row[known : len(holder.pages)] = holder.pages[known:]
        holder.num_table_entries = len(holder.pages)

    def table_of(self, chunks: Many[ScheduledChunk], width: int) -> Array:
        """Return the first `width` page numbers of each chunk's sequence, (len(chunks), width) int32.

        The array is valid until the next call.
        """
        for chunk in chunks:
            if chunk.holder.num_table_entries != len(chunk.holder.pages):
                self._tabulate(chunk.holder)
        return self._rows_of(chunks, width)

    def _rows_of(self, chunks: Many[ScheduledChunk], width: int) -> Array:
        if len(chunks) == 1:
            # A view: indexing with a list would copy the row in every step of a single sequence.
            row = chunks[0].holder.row
            return self._table[row : row + 1, :width]
        return self._table[[chunk.holder.row for chunk in chunks], :width]

    def _reserve(self, count: int) -> None:
        """Allocate larger buffers, which hold this many new tokens per step."""
        self._tokens, self._positions, self._text, self._slots, self._logits = (
            _Buffer(count, np.int64) for _ in range(5)
        )
