"""Decoded values stored as an ordinary weight: fake quantization. Loads anywhere and saves no byte.

For measuring what a scheme costs in quality, and for schemes that no format holds (activation-ordered groups). Not
lossless: decode(encode(x)) == x cannot hold, because codes and scales are multiplied out and their product is rounded
to the scale's dtype; the values are those that any loader of the codes would compute in that dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats._tensors import check_groups, matrix_shape, refuse_activations
from quantkit.formats.base import FLOAT_DTYPES
from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.numerics.tensor import QuantizedTensor


@dataclass(frozen=True)
class Dense:
    """The format itself; see `quantkit.formats.base.Format`."""

    keeps_codes: ClassVar[bool] = False
    holds_group_index: ClassVar[bool] = True
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse quantized activations, which a plain checkpoint cannot ask for, and groups that do not divide K.

        Args:
            scheme: of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: says which recipe field to change.
        """
        refuse_activations(scheme, "dense")
        check_groups(scheme, shape)

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """(N, K) of a linear from the shape of its weight."""
        return matrix_shape(shapes.get("weight"))

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """The decoded values, in the dtype in which loaders would compute them.

        Args:
            weight: (N, K), activation-ordered groups included.
            scheme: of its linear.
        Returns:
            `weight` (N, K).
        Raises:
            SchemeError: the scheme quantizes activations.
        """
        refuse_activations(scheme, "dense")
        return {"weight": weight.dequantize(weight.values_dtype)}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Impossible: the codes are not in the file.

        Raises:
            SchemeError: always.
        """
        raise SchemeError(
            "the dense format holds values, not codes, so it cannot be decoded; read 'weight' as it is, "
            "or write with --format compressed-tensors"
        )

    def config(
        self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """Nothing: to a loader this is an ordinary checkpoint."""
        return {}

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """None: nothing in config.json tells it from an ordinary checkpoint."""
        return None


FORMAT = Dense()
