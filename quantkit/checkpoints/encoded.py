"""A weight that the files hold as codes, as if it were the tensor of its values: dequantized when it is read.

Not here: what the codes mean. Whoever knows the format (`dense_source`) brings the function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoints.header import TensorInfo, kind_of

Dequantize = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedInfo(TensorInfo):
    """Kind, shape and bytes are those of the values; file and offset those of the first part.

    Args:
        parts: what the files hold in its place, by local name. Of a stack of matrices (E, ...) each is one too.
        dequantize: values of one matrix out of its parts.
    """

    parts: Mapping[str, TensorInfo]
    dequantize: Dequantize

    def item(self, index: int) -> "EncodedInfo":
        """See `TensorInfo`; of every part only the bytes of this entry are read."""
        parts = {name: part.item(index) for name, part in self.parts.items()}
        shape, num_bytes = self.shape[1:], self.num_bytes // self.shape[0]
        return replace(self, shape=shape, num_bytes=num_bytes, parts=parts)

    def read(self, read: Callable[[TensorInfo], Tensor]) -> Tensor:
        """The values, a stack of matrices one after another.

        Args:
            read: gives a tensor of the files.
        """
        if len(self.shape) < 3:
            return self.dequantize({name: read(part) for name, part in self.parts.items()})
        values = torch.empty(self.shape, dtype=self.dtype)
        for index in range(self.shape[0]):
            values[index] = self.item(index).read(read)
        return values


def encoded(
    parts: Mapping[str, TensorInfo], shape: tuple[int, ...], dtype: torch.dtype, dequantize: Dequantize
) -> EncodedInfo:
    """A weight of these parts, whose values have this shape and dtype."""
    first = next(iter(parts.values()))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return EncodedInfo(
        kind=kind_of(dtype),
        shape=shape,
        file=first.file,
        offset=first.offset,
        num_bytes=num_bytes,
        parts=parts,
        dequantize=dequantize,
    )
