"""Schemes and tensors that the tests of formats share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.formats._compressed_tensors_layout import library_formats, packs_densely
from quantkit.numerics.activation_quant import input_scale
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor


def linear(
    dtype: str,
    group_size: int | None = None,
    symmetric: bool = True,
    inputs: str | None = None,
    *,
    rows: int | None = 1,
    static: bool = False,
    input_group: int | None = None,
) -> LinearScheme:
    activation = None
    if inputs is not None:
        activation = ActivationScheme(
            dtype=DTYPES[inputs],
            granularity="tensor" if static else "token",
            dynamic=not static,
            group_size=input_group or DTYPES[inputs].group,
        )
    weight = WeightScheme(
        dtype=DTYPES[dtype], group_size=group_size or DTYPES[dtype].group, symmetric=symmetric, block_rows=rows
    )
    return LinearScheme(weight=weight, activation=activation)


SCHEMES = {
    "int4-g32": linear("int4", 32),
    "int4-g32-asym": linear("int4", 32, symmetric=False),
    "int8-channel": linear("int8"),
    "int8-g32-asym": linear("int8", 32, symmetric=False),
    "int3-g32": linear("int3", 32),
    "int3-channel-asym": linear("int3", symmetric=False),
    "int2-g16": linear("int2", 16),
    "fp8": linear("fp8"),
    "fp8-dynamic": linear("fp8", inputs="fp8"),
    "w8a8": linear("int8", inputs="int8"),
    "int5-g32": linear("int5", 32),
    "int6-g32-asym": linear("int6", 32, symmetric=False),
    "fp8-tensor": linear("fp8", rows=None),
    "fp8-static": linear("fp8", inputs="fp8", rows=None, static=True),
    "fp8-static-channel": linear("fp8", inputs="fp8", static=True),
    "fp8-block": linear("fp8", 16, inputs="fp8", rows=8, input_group=16),
    "w8a8-static": linear("int8", inputs="int8", static=True),
    "w4a8-int8": linear("int4", 32, inputs="int8"),
    "w4a8-fp8": linear("int4", 32, inputs="fp8"),
    "nvfp4": linear("nvfp4"),
    "nvfp4-a4": linear("nvfp4", inputs="nvfp4"),
    "mxfp4": linear("mxfp4"),
    "mxfp4-a4": linear("mxfp4", inputs="mxfp4"),
    "mxfp8": linear("mxfp8"),
    "mxfp8-a8": linear("mxfp8", inputs="mxfp8"),
}
if not packs_densely():  # an old library, which cannot hold them
    SCHEMES = {name: scheme for name, scheme in SCHEMES.items() if scheme.weight.dtype.bits not in (3, 5, 6)}
if "mxfp8-quantized" not in library_formats():
    SCHEMES = {name: scheme for name, scheme in SCHEMES.items() if not name.startswith("mxfp8")}


def quantize(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    """Rounded to nearest with the covering range."""
    return round_to_nearest(weight, WeightGrid(scheme, scale_dtype))


def with_input(weight: QuantizedTensor, scheme: LinearScheme, largest: float = 3.0) -> QuantizedTensor:
    """With a calibrated scale of the input, where the scheme has one, for inputs up to `largest`."""
    if scheme.activation is None or not scheme.activation.is_calibrated:
        return weight
    scale = input_scale(torch.tensor(largest), scheme.activation, weight.values_dtype)
    return replace(weight, input_scale=scale)


def random_tensor(seed: int, shape: tuple[int, int], scheme: WeightScheme, scale_dtype: torch.dtype) -> QuantizedTensor:
    """Every code and zero point may occur, not only those that rounding makes."""
    generator = torch.Generator().manual_seed(seed)
    if scheme.dtype.kind == "float":
        return quantize(torch.randn(shape, generator=generator), scheme, scale_dtype)
    low, high, groups = int(scheme.dtype.minimum), int(scheme.dtype.maximum) + 1, scheme.num_groups(shape[1])
    codes = torch.randint(low, high, shape, generator=generator).to(scheme.dtype.storage)
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(low, high, (shape[0], groups), generator=generator).to(torch.int8)
    scale = (torch.rand(shape[0], groups, generator=generator) + 0.1).to(scale_dtype)
    if scheme.symmetric and scheme.dtype.kind == "int":
        scale[1::2] *= -1  # the range search uses both signs
    return QuantizedTensor(codes=codes, scale=scale, zero_point=zero, scheme=scheme)
