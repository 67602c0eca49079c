"""What formats have in common that quantkit reads and does not write: their refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats.base import FLOAT_DTYPES
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor


class ReadOnly:
    """The half of `quantkit.formats.base.Format` that writes, refused; a subclass has `decode` and `recognise`."""

    name: ClassVar[str]
    keeps_codes: ClassVar[bool] = True
    holds_group_index: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES

    def _refuse(self) -> NoReturn:
        raise SchemeError(
            f"checkpoints of {self.name} are read, not written; set format=compressed-tensors, gptq, awq or gguf"
        )

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse everything.

        Raises:
            SchemeError: always.
        """
        self._refuse()

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """None: shapes alone do not tell."""
        return None

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """Refused.

        Raises:
            SchemeError: always.
        """
        self._refuse()

    def config(
        self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """Refused.

        Raises:
            SchemeError: always.
        """
        self._refuse()
