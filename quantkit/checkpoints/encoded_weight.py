"""Description of a quantized weight in a checkpoint, which can be read as dequantized values or as codes.

The checkpoint's format provides the decoder; see `dense_source`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from quantkit.checkpoints.header import TensorInfo, kind_of
from quantkit.errors import CheckpointError, SchemeError, located
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor

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
        """Return the description of a weight of this shape and dtype; `first` is its first part in the file.

        Args:
            first: stored tensor that gives `file` and `offset`.
            shape, dtype: shape and dtype of the dequantized values.
            fields: all other fields.
        """
        size = math.prod(shape) * dtype.itemsize
        return cls(kind=kind_of(dtype), shape=shape, file=first.file, offset=first.offset, num_bytes=size, **fields)

    def item(self, index: int) -> "EncodedInfo":
        """See `TensorInfo`; every part of the result covers only the bytes of this entry."""
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
