"""The two versions of the GPTQ format as one class. Layout: `_gptq_layout`; config.json: `_gptq_config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats import _gptq_layout as layout
from quantkit.formats._gptq_config import make_config, read_config
from quantkit.formats._tensors import matrix_shape
from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.numerics.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQ:
    """One version of the format; see `quantkit.formats.base.Format`.

    Args:
        name: as users write it.
        version: as config.json has it, "gptq" or "gptq_v2".
        zero_offset: what is subtracted from a zero point when it is stored.
    """

    name: str
    version: str
    zero_offset: int

    keeps_codes: ClassVar[bool] = True
    holds_group_index: ClassVar[bool] = True
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = layout.SCALE_DTYPES

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse what loaders of this layout do not take; see `_gptq_layout.check`.

        Args:
            scheme: of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: says which recipe field to change.
        """
        layout.check(scheme, shape, self.name)
        if self.zero_offset and not scheme.weight.symmetric:
            raise SchemeError(
                f"{self.name} stores zero points minus one, so a zero point of 0 does not fit; "
                "set format=gptq-v2, or weights.symmetric=true"
            )

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """(N, K) of a linear from the shapes of its tensors."""
        words = matrix_shape(shapes.get("qweight"))
        return words and (words[1], words[0] * 32 // scheme.weight.dtype.bits)

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """Tensors to write in place of `weight`; see `_gptq_layout.encode`."""
        return layout.encode(weight, self.zero_offset)

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Exactly what `encode` was given; see `_gptq_layout.decode`."""
        return layout.decode(tensors, scheme.weight, self.zero_offset)

    def config(
        self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """The `quantization_config` entry of config.json; see `_gptq_config.make_config`."""
        return make_config(linears, ignored, self.version, group_order=group_order)

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a config.json in this format, written by any tool; None when it is in another format."""
        return read_config(config, self.version)
