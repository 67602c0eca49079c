"""Fake quantization: store the dequantized values as an ordinary weight, which loads anywhere but saves no space.

Use it to measure the quality of a scheme, or for schemes that no other format holds (groups in activation order). Codes
cannot be recovered: `encode` multiplies them with their scales and rounds the product to the scale's dtype, exactly as
a loader of the codes would in that dtype.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats.base import Format
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor


class DenseFormat(Format):
    """The dense format. The result is an ordinary checkpoint, so config.json has no `quantization_config`."""

    name: ClassVar[str] = "dense"
    keeps_codes: ClassVar[bool] = False
    holds_group_index: ClassVar[bool] = True
    holds_transposed: ClassVar[bool] = True

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        return out_features * in_features * scale_bytes

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        self._check_activations(scheme)
        return {"weight": weight.dequantize(weight.values_dtype)}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        raise SchemeError(
            "the dense format stores dequantized values and no codes; read 'weight' directly, "
            "or write with --format compressed-tensors"
        )

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        return {}

    def owns(self, section: Mapping[str, Any]) -> bool:
        return False


FORMAT = DenseFormat()
