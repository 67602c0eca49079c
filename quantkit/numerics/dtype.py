"""Number types as values: `INT4.minimum` instead of scattered `2 ** bits - 1`.

A number type is what one code means; how codes are packed on disk is the business of `formats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.errors import SchemeError, suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class DType:
    """A low-bit number type.

    Args:
        name: as written in recipes.
        kind: "int" (uniform steps) or "float".
        bits: bits of one code.
        minimum, maximum: smallest and largest code value.
        storage: torch dtype that holds one unpacked code.
    """

    name: str
    kind: Literal["int", "float"]
    bits: int
    minimum: float
    maximum: float
    storage: torch.dtype

    @property
    def half_range(self) -> float:
        """What a symmetric absmax is divided by to get the scale: 7.5 for int4, 448 for fp8."""
        return (self.maximum - self.minimum) / 2

    @property
    def full_range(self) -> float:
        """Number of steps between the smallest and the largest code: 15 for int4."""
        return self.maximum - self.minimum


def _integer(bits: int) -> DType:
    half = 2 ** (bits - 1)
    return DType(name=f"int{bits}", kind="int", bits=bits, minimum=-half, maximum=half - 1, storage=torch.int8)


INT2, INT3, INT4, INT8 = _integer(2), _integer(3), _integer(4), _integer(8)
FP8 = DType(name="fp8", kind="float", bits=8, minimum=-448.0, maximum=448.0, storage=torch.float8_e4m3fn)

# Numbers that checkpoints of other tools have; recipes cannot ask for them. The codes of FP4 (e2m1) are kept as the
# values they mean, which e4m3 holds exactly; those of NF4 as the entries of its table.
FP4 = DType(name="fp4", kind="float", bits=4, minimum=-6.0, maximum=6.0, storage=torch.float8_e4m3fn)
NF4 = DType(name="nf4", kind="float", bits=4, minimum=-1.0, maximum=1.0, storage=torch.float32)

DTYPES = {dtype.name: dtype for dtype in (INT2, INT3, INT4, INT8, FP8)}


def find_dtype(name: str) -> DType:
    """The number type called `name` in recipes.

    Raises:
        SchemeError: no such type; the message lists the names.
    """
    if name not in DTYPES:
        raise SchemeError(f"unknown number type {name!r}{suggestion(name, DTYPES)}; there are: {', '.join(DTYPES)}")
    return DTYPES[name]
