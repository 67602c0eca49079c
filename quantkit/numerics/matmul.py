"""Matrix products summed in float32 on a CPU, with the fastest library that keeps full precision.

Float32 matrices: torch uses MKL, which has no AVX-512 code for AMD processors. oneDNN, also part of torch, has such
code and is twice as fast there, but torch uses oneDNN only if lower precision is allowed. oneDNN then still keeps all
bits, unless the processor has fast instructions for 16-bit floats (AMX, Arm). `keeps_precision` measures whether oneDNN
keeps them.

Bfloat16 matrices: torch on a CPU sums their products in bfloat16. The C code sums in float32 if the processor has
bfloat16 instructions. Such sums are as exact as those of float32 matrices, because the product of two bfloat16
numbers is exact in float32. They are computed twice as fast (five times with AMX).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.numerics import native

_SIZE = 256  # rows and columns of the product that is measured
_TOLERANCE = 1e-5  # largest relative error: float32 has 1e-7, operands rounded to bfloat16 2e-3


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """Make torch compute float32 products on a CPU with oneDNN inside the `with` block, if oneDNN keeps full precision.

    Args:
        device: device of the products; on a GPU nothing changes.
    """
    if device.type != "cpu" or torch.get_float32_matmul_precision() != "highest" or not keeps_precision():
        yield
        return
    with _lower_precision():
        yield


@contextmanager
def _lower_precision() -> Iterator[None]:
    """Allow torch lower precision inside the `with` block."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def keeps_precision() -> bool:
    """Whether products stay float32-accurate even when torch is allowed lower precision."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, _SIZE, _SIZE, generator=generator)
    with _lower_precision():
        product = left @ right
    exact = left.double() @ right.double()
    return float((product - exact).norm() / exact.norm()) < _TOLERANCE


class Packed(NamedTuple):
    """A (T, K) bfloat16 matrix in the memory layout that the C code reads; see `tile.h`.

    Args:
        values: bfloat16.
        rows: T.
        block: number of elements from one block of 16 columns to the next.
    """

    values: Tensor
    rows: int
    block: int

    def part(self, start: int, stop: int) -> "Packed":
        """Return the rows from `start`, which must be even, to `stop`."""
        assert start % 2 == 0, "rows are packed by twos"
        return Packed(self.values[start * BLOCK :], stop - start, self.block)


Operand = Tensor | Packed
"""A (T, K) factor of a product: float32, or packed bfloat16."""

BLOCK = 16
"""Number of columns that are packed together; a range of columns of an `Operand` must start at a multiple of it."""


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether C code can multiply bfloat16 matrices on this device, with sums in float32."""
    return device.type == "cpu" and native.has_avx512()


def packed_size(rows: int, columns: int) -> int:
    """Return the number of elements of a packed matrix of this shape."""
    return -(-rows // 2) * 2 * -(-columns // BLOCK) * BLOCK


def pack_matrix(values: Tensor, out: Tensor | None = None) -> Packed:
    """Pack a (T, K) bfloat16 matrix; needs the C library.

    Args:
        values: the matrix.
        out: memory of at least `packed_size` elements; None = new memory.
    """
    out = torch.empty(packed_size(*values.shape), dtype=torch.bfloat16) if out is None else out
    packed = Packed(out, len(values), packed_size(len(values), BLOCK))
    pack_into(packed, values)
    return packed


def pack_into(packed: Packed, values: Tensor) -> None:
    """Overwrite the first T rows of a packed matrix with (T, K) bfloat16 values."""
    values = values if values.stride(1) == 1 else values.contiguous()
    native.function("qk_pack", "pnnnpni")(
        values.data_ptr(), values.stride(0), *values.shape, packed.values.data_ptr(), packed.block,
        torch.get_num_threads(),
    )  # fmt: skip


def add_products(total: Tensor, left: Operand, columns: slice, right: Operand, *, lower: bool = False) -> None:
    """Add the product of `left` transposed and `right` to `total` in place.

    Args:
        total: (R, C) float32, contiguous.
        left: matrix with T rows. Both matrices must be float32, or both packed.
        columns: the R columns of `left` to use.
        right: matrix with T rows and at least C columns; the first C are used.
        lower: whether the caller needs only the lower triangle, because the product is symmetric. The values above
            the diagonal may then be wrong.
    """
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        assert isinstance(left, Tensor) and isinstance(right, Tensor), "one operand is packed, the other is not"
        total.addmm_(left[:, columns].T, right[:, : total.shape[1]])
        return
    own = left.values[columns.start // BLOCK * left.block :]
    assert columns.start % BLOCK == 0 and left.rows == right.rows and total.is_contiguous()
    native.function("qk_add_products", "ppnnnpnnni")(
        own.data_ptr(), right.values.data_ptr(), left.block, right.block, left.rows, total.data_ptr(), *total.shape,
        columns.start if lower else -1, torch.get_num_threads(),
    )  # fmt: skip
