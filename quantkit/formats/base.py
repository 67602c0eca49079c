"""The seam of all on-disk formats: pure functions on the tensors of one linear, under local names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.numerics.tensor import QuantizedTensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Format(Protocol):
    """One way to write a quantized model; an instance called FORMAT in its own file.

    Names in tensor dictionaries are local: `weight_packed`, not `model.layers.0.mlp.up_proj.weight_packed`.
    """

    @property
    def keeps_codes(self) -> bool:
        """Whether `decode` gives back exactly what `encode` was given; false where only the values are stored."""
        ...

    @property
    def holds_group_index(self) -> bool:
        """Whether groups may be formed in another order than that of the inputs."""
        ...

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """What scales can be stored in; the first is taken when a model's own dtype is none of them."""
        ...

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse what this format cannot hold, before any work is done.

        Args:
            scheme: of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: says which recipe field to change.
        """
        ...

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """Tensors to write in place of `weight`; `decode` gives back exactly the same codes and scales."""
        ...

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Inverse of `encode`."""
        ...

    def config(
        self, linears: Mapping[str, LinearScheme], left_alone: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """Entries to add to config.json.

        Args:
            linears: scheme of each quantized linear by full module name.
            left_alone: full names of linears that are not quantized, the output head included.
            group_order: whether groups of some linear follow another order than that of the inputs; only formats
                with `holds_group_index` are told so.
        """
        ...

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme that a config.json in this format describes; None when it is not in this format."""
        ...
