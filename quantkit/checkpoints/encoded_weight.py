"""Descriptions of quantized weights in a checkpoint, which can be read as dequantized values or as codes.

The checkpoint's format provides the decoder of an `EncodedInfo`; see `dense_source`. `BlocksInfo` and `LatentInfo`
describe tensors of a GGUF file and read them with the values, row order and shapes of the original model. llama.cpp
reorders the rows of query and key projections, and adds one to the norms of some models; both changes are undone here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from quantkit.checkpoints.header import TensorInfo, kind_of
from quantkit.errors import CheckpointError, SchemeError, located
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as Block

# About this many values of a GGUF tensor are decoded at once; each takes 4 bytes before it is rounded.
_STEP_VALUES = 1 << 22

Decoder = Callable[[Mapping[str, Tensor], LinearScheme], QuantizedTensor]
Read = Callable[[TensorInfo], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedInfo(TensorInfo):
    """Description of a quantized weight.

    `kind`, `shape` and `num_bytes` are those of the dequantized values, `file` and `offset` those of the first part.

    Args:
        where: file and name of the weight, for messages.
        parts: stored tensors (codes, scales, ...), keyed by local name; for a stack of matrices, each part is (E, ...).
        scheme: scheme of the linear; None = the weight can be read only as values, not as codes.
        decoder: function that decodes the parts of one matrix; required if there is a scheme.
        transposed: whether the values are (K, N) instead of (N, K).
    """

    where: str
    parts: Mapping[str, TensorInfo]
    scheme: LinearScheme | None = None
    decoder: Decoder | None = None
    transposed: bool = False

    @classmethod
    def of(cls, first: TensorInfo, shape: tuple[int, ...], dtype: torch.dtype, **fields: Any) -> Self:
        """Return the description of a weight.

        Args:
            first: the first part; it gives `file` and `offset`.
            shape, dtype: shape and dtype of the dequantized values.
            fields: all other fields.
        """
        size = math.prod(shape) * dtype.itemsize
        return cls(kind=kind_of(dtype), shape=shape, file=first.file, offset=first.offset, num_bytes=size, **fields)

    def item(self, index: int) -> EncodedInfo:
        """See `TensorInfo.item`; the parts of the result cover only the bytes of this entry."""
        parts = {name: part.item(index) for name, part in self.parts.items()}
        shape, num_bytes = self.shape[1:], self.num_bytes // self.shape[0]
        return replace(self, shape=shape, num_bytes=num_bytes, parts=parts)

    def codes(self, read: Read) -> QuantizedTensor:
        """Return the codes (N, K) of a matrix, with the calibrated scale of the linear's input if one is stored.

        Args:
            read: function that reads a stored tensor.
        Raises:
            SchemeError: the codes do not have the scheme that config.json gives.
        """
        assert self.scheme is not None, f"{self.where} has no codes"
        weight = self._codes(self.scheme, read)
        if weight.scheme != self.scheme.weight:
            stored, said = weight.scheme.describe(), self.scheme.weight.describe()
            raise SchemeError(
                f"{self.where} is stored as {stored}, but config.json says {said}; copy the original config.json"
            )
        return weight

    def values(self, read: Read) -> Tensor:
        """Return the dequantized values; the matrices of a stack are decoded one after another.

        Args:
            read: function that reads a stored tensor.
        Raises:
            CheckpointError: some values are not finite, or the shapes of codes and scales do not match.
        """
        if len(self.shape) < 3:
            return self._matrix(read)
        values = torch.empty(self.shape, dtype=self.dtype)
        for index in range(self.shape[0]):
            values[index] = self.item(index)._matrix(read)
        return values

    def _matrix(self, read: Read) -> Tensor:
        assert self.scheme is not None, f"{self.where} has no codes"
        weight = self._codes(replace(self.scheme, activation=None), read)
        # Dequantize in the dtype of the scales, as libraries do, then convert to the model's dtype.
        values = weight.dequantize(weight.values_dtype).to(self.dtype)
        if not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).sum())
            scales = "a code" if bool(torch.isfinite(weight.scale.float()).all()) else "a scale"
            raise CheckpointError(
                f"{self.where} dequantizes to {bad} NaN or infinite values, because {scales} is not finite or too "
                "large; download the file again"
            )
        return values.T.contiguous() if self.transposed else values

    def _codes(self, scheme: LinearScheme, read: Read) -> QuantizedTensor:
        assert self.decoder is not None, f"{self.where} has a scheme but no decoder"
        with located(self.where):
            weight = self.decoder({name: read(part) for name, part in self.parts.items()}, scheme)
            shape = self.shape[::-1] if self.transposed else self.shape
            if weight.shape != shape:
                raise CheckpointError(f"decodes to shape {weight.shape}, expected {shape}; download the file again")
            return weight


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
            raise CheckpointError(f"{self.where} holds NaN or infinite values; download the file again")
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
