"""Read tensors of a GGUF file with the values, row order and shapes of the original model.

llama.cpp reorders the rows of query and key projections, and adds one to the norms of some models; this module undoes
both changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.checkpoints.encoded_weight import EncodedInfo, Read
from quantkit.checkpoints.header import TensorInfo
from quantkit.errors import CheckpointError
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as Block

# About this many values are decoded at once; each takes 4 bytes before it is rounded.
_STEP_VALUES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksInfo(EncodedInfo):
    """Description of a tensor (N, K) or (N,) of a GGUF file; `parts` holds only the stored tensor. See `EncodedInfo`.

    Args:
        block: GGUF type of the stored tensor; None = rows are returned as bytes, without decoding.
        heads: number of heads whose rows are interleaved in the file; 0 = rows keep their order.
        added: number that llama.cpp has added to the values in the file; `dequantize` subtracts it.
    """

    block: Block | None
    heads: int = 0
    added: float = 0.0

    @property
    def stored(self) -> TensorInfo:
        """The tensor in the file."""
        return next(iter(self.parts.values()))

    def order(self, rows: Tensor) -> Tensor:
        """Convert row indices in the model to row indices in the file."""
        if not self.heads:
            return rows
        size = self.stored.shape[0] // self.heads
        head, row = rows // size, rows % size
        # The file has row 0 of the first half, row 0 of the second half, row 1 of the first half, ...
        return head * size + row % (size // 2) * 2 + row // (size // 2)

    def dequantize(self, raw: Tensor) -> Tensor:
        """Convert stored rows to values.

        Raises:
            CheckpointError: some values are not finite.
        """
        from quantkit.formats.ggml.blocks import PLAIN, dequantize_blocks  # needs gguf

        if self.block is None:
            return raw
        width = self.shape[:-1] if self.transposed else self.shape[1:]
        values = raw if self.block in PLAIN else dequantize_blocks(self.block, raw, (len(raw), *width))
        if self.added:
            values = values.float() - self.added
        values = values.to(self.dtype)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{self.where}: holds NaN or infinite values; download the file again")
        return values

    def values(self, read: Read) -> Tensor:
        stored = self.stored
        step = max(1, _STEP_VALUES // max(1, self.num_bytes // self.dtype.itemsize // max(1, stored.shape[0])))
        parts = [self.dequantize(read(stored.rows(at, at + step))) for at in range(0, stored.shape[0], step)]
        values = torch.cat(parts) if len(parts) != 1 else parts[0]
        if self.heads:
            values = values[self.order(torch.arange(len(values)))]
        return values.T.contiguous() if self.transposed else values

    def _codes(self, scheme: LinearScheme, read: Read) -> QuantizedTensor:
        weight = EncodedInfo._codes(self, scheme, read)
        return weight.take_rows(self.order(torch.arange(weight.shape[0]))) if self.heads else weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentInfo(EncodedInfo):
    """Description of `kv_b_proj` of latent attention, which newer GGUF files store as two tensors.

    Args:
        key: tensor for the keys, (heads, rank, channels of a key): transposed, unlike `value`.
        value: tensor for the values, (heads, channels of a value, rank).
    """

    key: BlocksInfo
    value: BlocksInfo

    def values(self, read: Read) -> Tensor:
        return torch.cat([self.key.values(read).mT, self.value.values(read)], dim=1).reshape(self.shape)
