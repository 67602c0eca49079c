"""Forms in which weights are stored, and the bytes of a matrix in each. Arithmetic only; torch-free.

A recipe's weights take the bytes that its format counts (`Format.linear_bytes`). Without a recipe codes are packed into
32-bit words along the inputs, with a scale per group in the model's own number type and zero points packed along the
outputs, as compressed-tensors has them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quantkit.quantities import fitting_group

_SHAPE_BYTES = 16  # weight_shape: two int64 beside every packed weight
_PRODUCTS = {"nvfp4": "fp4", "mxfp4": "fp4", "mxfp8": "fp8"}  # by the type of the inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightForm:
    """Storage of a model's linears.

    Args:
        name: for tables, e.g. `int4 g128`.
        bits: of one code.
        group_size: inputs that share a scale; None = one scale per output channel.
        symmetric: no zero points.
        scaled: False for numbers that are what they say: bf16, fp32, or codes counted without their scales.
        compute: numbers that products are made of: "bf16"; "int8", "fp8" or "fp4" where activations are quantized too.
        counted: bytes of a weight from N, K and the bytes of a scale, by its format; None = as above.
        beside: bytes of what a file holds beside a weight, from the bytes of a scale, by its format; None = as above.
    """

    name: str
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    scaled: bool = True
    compute: str = "bf16"
    counted: Callable[[int, int, int], int] | None = None
    beside: Callable[[int], int] | None = None

    def fitted(self, in_features: int) -> "WeightForm":
        """Return the form in the groups that `quantize` falls back to, where its own do not divide this many inputs.

        Only for forms that no format counts: those of a recipe have got their groups when it was assigned.
        """
        if self.group_size is None:
            return self
        assert self.counted is None, f"{self.name}: its format counts it in groups of {self.group_size}"
        return replace(self, group_size=fitting_group(self.group_size, in_features))

    def fits(self, in_features: int) -> bool:
        """Whether groups divide this many inputs."""
        return not self.scaled or self.group_size is None or in_features % self.group_size == 0

    def matrix_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Codes, scales and zero points of a weight (N, K).

        Args:
            out_features, in_features: N and K.
            scale_bytes: of one scale, the size of the model's number type.
        """
        if self.counted is not None:
            return self.counted(out_features, in_features, scale_bytes)
        if not self.scaled:
            return out_features * in_features * self.bits // 8
        groups = 1 if self.group_size is None else math.ceil(in_features / self.group_size)
        zeros = 0 if self.symmetric else 4 * math.ceil(out_features * self.bits / 32) * groups
        words = out_features * math.ceil(in_features * self.bits / 32)
        return 4 * words + out_features * groups * scale_bytes + zeros

    def file_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """`matrix_bytes` and what a file holds beside it."""
        packed = _SHAPE_BYTES if self.scaled and self.compute == "bf16" else 0
        extra = packed if self.beside is None else self.beside(scale_bytes)
        return self.matrix_bytes(out_features, in_features, scale_bytes) + extra

    def bits_per_weight(self, scale_bytes: int = 2) -> float:
        """Bits per weight of a matrix without edges that no format counts; the scale of a channel counts nothing."""
        if not self.scaled or self.group_size is None:
            return float(self.bits)
        return self.bits + (8 * scale_bytes + (0 if self.symmetric else self.bits)) / self.group_size


FP32_WEIGHTS = WeightForm(name="fp32", bits=32, scaled=False)
BF16_WEIGHTS = WeightForm(name="bf16", bits=16, scaled=False)
FP8_WEIGHTS = WeightForm(name="fp8 channel", bits=8, compute="fp8")
INT8_WEIGHTS = WeightForm(name="int8 channel", bits=8)
INT4_WEIGHTS = WeightForm(name="int4 g128", bits=4, group_size=128)
INT3_WEIGHTS = WeightForm(name="int3 g128", bits=3, group_size=128)
INT2_WEIGHTS = WeightForm(name="int2 g64 asym", bits=2, group_size=64, symmetric=False)
COMPARED_WEIGHTS = (FP8_WEIGHTS, INT8_WEIGHTS, INT4_WEIGHTS, INT3_WEIGHTS, INT2_WEIGHTS)
UNSCALED_WEIGHTS = tuple(WeightForm(name=f"{bits} bits, no scales", bits=bits, scaled=False) for bits in (8, 4))


def from_linear(linear: Any, layout: str = "compressed-tensors") -> WeightForm:
    """The form of a recipe's scheme for one linear.

    Args:
        linear: a `quantkit.numerics.scheme.LinearScheme`; not imported here, because that would import torch.
        layout: on-disk format of the recipe.
    """
    from quantkit.formats import REGISTRY  # reads schemes, so torch is there already

    weight, activation, format_ = linear.weight, linear.activation, REGISTRY.load(layout)
    return WeightForm(
        name=linear.describe(),
        bits=weight.dtype.bits,
        group_size=weight.group_size,
        symmetric=weight.symmetric,
        compute="bf16" if activation is None else _PRODUCTS.get(activation.dtype.name, activation.dtype.name),
        counted=partial(format_.linear_bytes, linear),
        beside=partial(format_.beside_bytes, linear),
    )
