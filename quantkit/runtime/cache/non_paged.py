"""Caches that do not store one key and value per token: DeepSeek-V4 entries and states of recurrent layers.

`StatePool` has one row per running sequence: the state of a recurrent layer after the tokens computed so far.
`EntryPool` holds the entries of DeepSeek-V4, each of which stands for several tokens.

A page has bytes for entries and bytes for keys of the indexer. The entries of a sequence fill the entry bytes of its
pages one after another, and may cross page boundaries; the same holds for the indexer's keys:

    page 0         page 1         page 2
    │ e0 e1 e2 e3 │ e4 e5 ...    │              page size 16, one entry for 4 tokens
    │ e0 ...      │ ... e0       │ e1 ...       page size 64, one entry for 128 tokens: half an entry in each page

A quantized entry consists of codes, the rotated channels in 16 bits, and one byte per block of codes: the exponent of
the block's power-of-two scale. A quantized key of the indexer has the same parts except the rotated channels.
Shapes of entries: n entries, D channels. Shapes of states: B sequences, C channels of the convolution; H, N, P and W as
in `models.recurrent`.
Source: vLLM's cache layout for V4 (fp8: 584 bytes per entry, 132 per key).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.layouts import EntryLayout
from quantkit.kernels.reference.kv_codes import numbers_of, pack_codes
from quantkit.kernels.types import ForwardBatch
from quantkit.models import layer_state_sizes
from quantkit.models.layer_state_sizes import StateShape, exponent_bytes
from quantkit.numerics.dtype import FP8, INT4, DType


class StatePool:
    """States of one recurrent layer, one row per running sequence. *Mutable*.

    `ForwardBatch.residual_rows` gives the row of each sequence; `KVCache` lists the rules for it. Tokens cannot be
    removed from a state. Rows need no clearing: a sequence without computed tokens reads zeros.

    Args:
        shape: shape of one layer's state.
        num_rows: maximum number of sequences that run at the same time.
        device: device of the pool.
    """

    def __init__(self, shape: StateShape, num_rows: int, device: torch.device) -> None:
        sizes = (shape.conv_width - 1, shape.channels), (shape.value_heads, shape.key_dim, shape.value_dim)
        self._pools = [torch.zeros(num_rows, *size, dtype=torch.float32, device=device) for size in sizes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(pool.nbytes for pool in self._pools)

    def read(self, run: "Run") -> tuple[Tensor, Tensor]:
        """Return the convolution's past inputs (B, W - 1, C) and the states (B, H, N, P) of a run's sequences.

        Both are zero for sequences without computed tokens.
        """
        past, state = (pool[run.rows] for pool in self._pools)
        return (past.zero_(), state.zero_()) if run.begins else (past, state)

    def write(self, run: "Run", past: Tensor, state: Tensor) -> None:
        """Store the past inputs and states that the next `read` returns."""
        for pool, values in zip(self._pools, (past, state), strict=True):
            pool[run.rows] = values


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive sequences of a batch that have the same number of new tokens.

    Args:
        tokens: slice of the batch's new tokens that belongs to these sequences.
        rows: (B,) row of each sequence in the state pools.
        begins: whether no token of these sequences has been computed yet.
    """

    tokens: slice
    rows: Tensor
    begins: bool


def runs(batch: ForwardBatch) -> Iterator[Run]:
    """Split a batch into runs: consecutive sequences that have the same number of new tokens and either all begin
    or all continue. Decoding sequences that follow each other thus form one run.
    """
    start = row = 0
    lengths = zip(batch.query_lengths, batch.context_lengths, strict=True)
    for (length, begins), members in groupby((new, new == context) for new, context in lengths):
        count = len(list(members))
        stop = start + count * length
        yield Run(tokens=slice(start, stop), rows=batch.residual_rows[row : row + count], begins=begins)
        start, row = stop, row + count


_BIAS = 127  # added to an exponent to store it as a byte


@dataclass(frozen=True, slots=True)
class EntryCodes:
    """Encodes vectors (n, D), which are entries or keys of the indexer, as bytes (n, B), and decodes the bytes.

    Args:
        width: number of channels D of a vector.
        rotated: number of rotated channels at the end of a vector; they are never quantized.
        block: number of channels that share a power-of-two scale.
        multiple: the exponents are padded to a multiple of this many bytes.
        number: number type of the codes; None = values are stored unquantized in `dtype`.
        dtype: dtype of unquantized values.
    """

    width: int
    rotated: int
    block: int
    multiple: int
    number: DType | None
    dtype: torch.dtype

    @property
    def plain(self) -> int:
        """Number of channels that are quantized."""
        return self.width - self.rotated

    @property
    def num_bytes(self) -> int:
        """Number of bytes B of one encoded vector."""
        if self.number is None:
            return self.width * self.dtype.itemsize
        return self._code_bytes + 2 * self.rotated + exponent_bytes(self.plain, self.block, self.multiple)

    @property
    def _code_bytes(self) -> int:
        return self.plain if self.number is not INT4 else self.plain // 2

    def encode(self, values: Tensor) -> Tensor:
        """Encode vectors (n, D) of any float dtype as (n, B) uint8."""
        if self.number is None:
            return values.to(self.dtype).contiguous().view(torch.uint8)
        plain, rotated = values.tensor_split((self.plain,), dim=1)
        padded = F.pad(plain.float(), (0, -self.plain % self.block))
        blocks = padded.view(len(padded), -1, self.block)  # (n, G, block)
        limit = self.number.maximum
        exponents = (blocks.abs().amax(-1) / limit).log2().ceil().clamp(-_BIAS, _BIAS)  # (n, G)
        numbers = (blocks * torch.exp2(-exponents).unsqueeze(-1)).flatten(1)[:, : self.plain].clamp(-limit, limit)
        unused = exponent_bytes(self.plain, self.block, self.multiple) - exponents.shape[1]
        stored = F.pad((exponents + _BIAS).to(torch.uint8), (0, unused))
        kept = rotated.to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([self._codes(numbers), kept, stored], dim=1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode (n, B) uint8 to vectors (n, D); the inverse of `encode` up to rounding."""
        if self.number is None:
            return stored.contiguous().view(self.dtype).to(dtype)
        codes, kept, exponents = stored.tensor_split((self._code_bytes, self._code_bytes + 2 * self.rotated), dim=1)
        scales = torch.exp2(exponents.float() - _BIAS).repeat_interleave(self.block, dim=1)[:, : self.plain]
        rotated = kept.contiguous().view(torch.bfloat16)
        numbers = numbers_of(codes.contiguous(), self.number) - 8 * (self.number is INT4)
        return torch.cat([(numbers * scales).to(dtype), rotated.to(dtype)], dim=1)

    def _codes(self, numbers: Tensor) -> Tensor:
        if self.number is FP8:
            return numbers.to(FP8.storage).view(torch.uint8)
        if self.number is INT4:
            return pack_codes((numbers.round() + 8).to(torch.uint8), 4)
        return numbers.round().to(torch.int8).view(torch.uint8)


class EntryPool:
    """DeepSeek-V4's cache of one layer: entries in pages, and one row per running sequence. *Mutable*.

    A row holds the keys of the sliding window and the inputs of the next entries. Rows need no clearing.

    Args:
        layout: layout of the layer's cache.
        num_pages: pages in the pool.
        num_rows: maximum number of sequences that run at the same time.
        device: device of the pool.
    """

    def __init__(self, layout: EntryLayout, num_pages: int, num_rows: int, device: torch.device) -> None:
        shape, kept = layout.shape, (layout.scheme.key.dtype, layout.dtype)
        self._entry = EntryCodes(
            shape.key_dim, shape.rope_dim, layer_state_sizes.ENTRY_BLOCK, layer_state_sizes.ENTRY_EXPONENTS, *kept
        )
        self._codes = [self._entry]
        if shape.index_dim:
            self._codes.append(
                EntryCodes(shape.index_dim, 0, layer_state_sizes.INDEX_BLOCK, layer_state_sizes.INDEX_EXPONENTS, *kept)
            )
        sizes = shape.page_parts(layout.form, layout.page_size)
        self._pages = [torch.empty(num_pages, size, dtype=torch.uint8, device=device) for size in sizes]
        window, past = shape.window or 0, (num_rows, shape.past_tokens, shape.past_width)
        self._window = torch.empty(num_rows, window, self._entry.num_bytes, dtype=torch.uint8, device=device)
        self._past = torch.empty(past, dtype=layout.dtype, device=device)

    @property
    def num_page_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.nbytes for pages in self._pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self._window.nbytes + self._past.nbytes

    def window(self, row: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the stored keys in the next token's sliding window, (n, D).

        Args:
            row: row of the sequence.
            length: number of computed tokens of the sequence.
            dtype: dtype of the keys.
        """
        size = self._window.shape[1]
        slots = torch.arange(max(0, length - size + 1), length, device=row.device) % size
        return self._entry.decode(self._window[row, slots], dtype)

    def keep_window(self, row: Tensor, length: int, keys: Tensor) -> None:
        """Store the keys (n, D) of a sequence's newest tokens; `length` counts all its tokens, the newest included."""
        size = self._window.shape[1]
        slots = torch.arange(max(length - len(keys), length - size), length, device=row.device) % size
        self._window[row, slots] = self._entry.encode(keys[-size:])

    def past(self, row: Tensor, length: int) -> Tensor:
        """Return the stored inputs of a sequence's next entries.

        Args:
            row: row of the sequence.
            length: number of computed tokens of the sequence.
        Returns:
            (n, past width), one row for each of the last n tokens; n is `length`, but at most `past_tokens`.
        """
        size = self._past.shape[1]
        return self._past[row, max(0, size - length) :]

    def keep_past(self, row: Tensor, past: Tensor) -> None:
        """Store inputs of the next entries, (n, past width), newest token last; keep only the last `past_tokens`."""
        count = min(len(past), self._past.shape[1])
        self._past[row, self._past.shape[1] - count :] = past[len(past) - count :].to(self._past.dtype)

    def entries(self, pages: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the first `count` entries (n, D) of a sequence.

        If the layer has an indexer, the list also contains the indexer's keys (n, D) of these entries.

        Args:
            pages: pages of the sequence, in order.
            count: number of entries n.
            dtype: dtype of the returned tensors.
        """
        return [
            codes.decode(pool[pages].view(-1)[: count * codes.num_bytes].view(count, codes.num_bytes), dtype)
            for codes, pool in zip(self._codes, self._pages, strict=False)
        ]

    def append(self, pages: Tensor, first: int, entries: Sequence[Tensor]) -> None:
        """Store new entries of one sequence after its earlier entries.

        Args:
            pages: pages of the sequence, in order.
            first: index of the first new entry among all entries of the sequence.
            entries: the new entries (n, D), then the indexer's keys (n, D) if the layer has an indexer.
        """
        for codes, pool, values in zip(self._codes, self._pages, entries, strict=False):
            stored = codes.encode(values).view(-1)
            offsets = torch.arange(len(stored), device=stored.device) + first * codes.num_bytes
            pool[pages[offsets // pool.shape[1]], offsets % pool.shape[1]] = stored
