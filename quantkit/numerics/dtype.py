"""Number types as objects, so that code uses `INT4.minimum` and does not compute limits from a number of bits.

A number type defines the meaning of one code; `formats` packs codes on disk.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from quantkit.errors import SchemeError, suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class DType:
    """A low-bit number type.

    Args:
        name: name in recipes.
        kind: "int" (uniform steps) or "float".
        bits: bits of one code.
        minimum, maximum: smallest and largest code value.
        storage: torch dtype that holds one unpacked code.
        group: number of inputs that share one scale, if the type fixes it; None = the scheme decides.
        scale: how scales are stored: "float" (in the model's dtype), "e4m3" (8-bit floats under one float32 scale of
            the whole tensor), "e8m0" (powers of two) or "ggml" (whole multiples of a float16 scale of a block).
        spacing: for floats, the smallest normal number and the number of mantissa bits; None = rounding to this type is
            not supported.
        block: for types of ggml, the number of values in a block and its bytes; None = there are no blocks.
        levels: for types of ggml, the smallest and the largest whole number that multiplies the scale of a block.
        has_minimums: for types of ggml, whether each group has a minimum, which becomes its zero point.
    """

    name: str
    kind: Literal["int", "float"]
    bits: int
    minimum: float
    maximum: float
    storage: torch.dtype
    group: int | None = None
    scale: Literal["float", "e4m3", "e8m0", "ggml"] = "float"
    spacing: tuple[float, int] | None = None
    block: tuple[int, int] | None = None
    levels: tuple[int, int] = (1, 1)
    has_minimums: bool = False

    @property
    def half_range(self) -> float:
        """Divisor that turns an absmax into a symmetric scale: 7.5 for int4, 448 for fp8."""
        # The range then ends half a step beyond the last code at one end, and half a step before it at the other.
        # For int4, 7 would leave code -8 unused, and 8 would clip a whole step.
        return (self.maximum - self.minimum) / 2

    @property
    def full_range(self) -> float:
        """Number of steps between the smallest and the largest code: 15 for int4."""
        return self.maximum - self.minimum


def _integer(bits: int) -> DType:
    half = 2 ** (bits - 1)
    return DType(name=f"int{bits}", kind="int", bits=bits, minimum=-half, maximum=half - 1, storage=torch.int8)


def _float(name: str, bits: int, maximum: float, **fields: Any) -> DType:
    """Return a float type. Each code is stored in e4m3 as the number that it stands for, exactly."""
    storage = torch.float8_e4m3fn
    return DType(name=name, kind="float", bits=bits, minimum=-maximum, maximum=maximum, storage=storage, **fields)


def _ggml(name: str, group: int, block: tuple[int, int], levels: tuple[int, int] = (1, 1)) -> DType:
    """Return the number type of a ggml block. Its codes start at -2^(bits - 1) here, even if the file counts from 0."""
    # Among the types below, only Q3_K and Q6_K have no minimums.
    has_minimums = name not in ("q3_k", "q6_k")
    of_code = _integer(int(name[1]))
    return replace(of_code, name=name, group=group, scale="ggml", block=block, levels=levels, has_minimums=has_minimums)


INT2, INT3, INT4, INT5, INT6, INT8 = (_integer(bits) for bits in (2, 3, 4, 5, 6, 8))
_E4M3, _E2M1 = (2.0**-6, 3), (1.0, 1)  # as `DType.spacing`
FP8 = _float("fp8", 8, 448.0, spacing=_E4M3)
# Microscaling types.
# FP4 is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
NVFP4 = _float("nvfp4", 4, 6.0, group=16, scale="e4m3", spacing=_E2M1)
MXFP4 = _float("mxfp4", 4, 6.0, group=32, scale="e8m0", spacing=_E2M1)
MXFP8 = _float("mxfp8", 8, 448.0, group=32, scale="e8m0", spacing=_E4M3)
# Types of ggml; see `super_blocks`.
Q4_1, Q5_1 = _ggml("q4_1", 32, (32, 20)), _ggml("q5_1", 32, (32, 24))
Q2_K = _ggml("q2_k", 16, (256, 84), (0, 15))
Q3_K = _ggml("q3_k", 16, (256, 110), (-32, 31))
Q4_K = _ggml("q4_k", 32, (256, 144), (0, 63))
Q5_K = _ggml("q5_k", 32, (256, 176), (0, 63))
Q6_K = _ggml("q6_k", 16, (256, 210), (-128, 127))
# The type to use instead of one whose block size does not divide the row, as in llama-quantize.
FALLBACK = {Q2_K.name: INT4, Q3_K.name: INT4, Q4_K.name: INT5, Q5_K.name: Q5_1, Q6_K.name: INT8}

# NF4 is only read from checkpoints of other tools; recipes cannot use it. A code is kept as its lookup table's value.
NF4 = DType(name="nf4", kind="float", bits=4, minimum=-1.0, maximum=1.0, storage=torch.float32)

DTYPES = {dtype.name: dtype for dtype in (INT2, INT3, INT4, INT5, INT6, INT8, FP8, NVFP4, MXFP4, MXFP8)}
GGML_TYPES = {dtype.name: dtype for dtype in (Q4_1, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)}


def find_dtype(name: str) -> DType:
    """Return the number type with this name in recipes.

    Raises:
        SchemeError: there is no such type; the message lists the names.
    """
    known = DTYPES | GGML_TYPES
    if name not in known:
        raise SchemeError(f"unknown number type {name!r}{suggestion(name, known)}; supported: {', '.join(known)}")
    return known[name]
