"""Products summed in float32, by what is quickest here at full precision.

Of float32 matrices: MKL, which torch asks for them, has no AVX-512 code for processors of AMD; oneDNN, which torch
carries too, has, and is twice as fast there. torch asks oneDNN only where lower precision is allowed, and oneDNN then
keeps all bits unless the processor has instructions for 16-bit floats that pay (AMX, Arm): which of the two holds is
measured, once.
Of bfloat16 matrices, which torch on a CPU can only sum in bfloat16: by C where the processor multiplies them, as exact
as in float32, since products of bfloat16 have all their bits in it, and twice as fast (with AMX five times).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.numerics import native

_SIZE = 256  # of the product that is measured
_TOLERANCE = 1e-5  # of its relative error: float32 has 1e-7, operands rounded to bfloat16 2e-3


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """While open, float32 products on a CPU are computed by oneDNN if it keeps full precision.

    Args:
        device: where the work is done; on a GPU nothing is changed.
    """
    before = torch.get_float32_matmul_precision()
    if device.type != "cpu" or before != "highest" or not keeps_precision():
        yield
        return
    try:
        torch.set_float32_matmul_precision("medium")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def keeps_precision() -> bool:
    """Whether products are as exact where torch is allowed less than float32."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, _SIZE, _SIZE, generator=generator)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        product = left @ right
    finally:
        torch.set_float32_matmul_precision(before)
    exact = left.double() @ right.double()
    return float((product - exact).norm() / exact.norm()) < _TOLERANCE


class Packed(NamedTuple):
    """A (T, K) bfloat16 matrix in the order in which C multiplies it, see `tile.h`.

    Args:
        values: bfloat16.
        rows: T.
        block: elements from one block of 16 columns to the next.
    """

    values: Tensor
    rows: int
    block: int

    def part(self, start: int, stop: int) -> "Packed":
        """Rows, from an even one on."""
        assert start % 2 == 0, "rows are packed by twos"
        return Packed(self.values[start * BLOCK :], stop - start, self.block)


Operand = Tensor | Packed
"""A (T, K) matrix to be multiplied: float32, or packed bfloat16."""

BLOCK = 16
"""Columns that are packed together; those of an `Operand` that are multiplied begin at a multiple of it."""


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether matrices in bfloat16 need not be copied into float32 to be multiplied."""
    return device.type == "cpu" and native.has_avx512()


def packed_size(rows: int, columns: int) -> int:
    """Elements of a matrix of this shape, packed."""
    return -(-rows // 2) * 2 * -(-columns // BLOCK) * BLOCK


def pack_matrix(values: Tensor, out: Tensor | None = None) -> Packed:
    """A (T, K) bfloat16 matrix, packed into `out`, if given, which has at least its `packed_size`; there must be C."""
    out = torch.empty(packed_size(*values.shape), dtype=torch.bfloat16) if out is None else out
    packed = Packed(out, len(values), packed_size(len(values), BLOCK))
    pack_into(packed, values)
    return packed


def pack_into(packed: Packed, values: Tensor) -> None:
    """Write the rows of a matrix anew: (T, K) bfloat16, T of them from the first on."""
    values = values if values.stride(1) == 1 else values.contiguous()
    _function("qk_pack", "pnnnpni")(
        values.data_ptr(), values.stride(0), *values.shape, packed.values.data_ptr(), packed.block,
        torch.get_num_threads(),
    )  # fmt: skip


def add_products(total: Tensor, left: Operand, columns: slice, right: Operand, *, lower: bool = False) -> None:
    """Add left' right to a sum in place, both operands in float32 or both packed.

    Args:
        total: (R, C) float32, contiguous.
        left: (T, ...), of which these columns are taken, R of them.
        columns: of `left`.
        right: (T, ...), of which the first C columns are taken.
        lower: of the whole product of a matrix with itself, what is above the diagonal is not asked for.
    """
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        assert isinstance(left, Tensor) and isinstance(right, Tensor), "one operand is packed, the other is not"
        total.addmm_(left[:, columns].T, right[:, : total.shape[1]])
        return
    own = left.values[columns.start // BLOCK * left.block :]
    assert columns.start % BLOCK == 0 and left.rows == right.rows and total.is_contiguous()
    _function("qk_add_products", "ppnnnpnnni")(
        own.data_ptr(), right.values.data_ptr(), left.block, right.block, left.rows, total.data_ptr(), *total.shape,
        columns.start if lower else -1, torch.get_num_threads(),
    )  # fmt: skip


@cache
def _function(name: str, arguments: str) -> native.Function:
    """A function of the C library: p = pointer, n = size, i = int."""
    types = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int}
    return native.function(name, *[types[letter] for letter in arguments])
