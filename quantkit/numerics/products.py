"""Products of float32 matrices by the library that is quickest here at full precision.

MKL, which torch asks for them, has no AVX-512 code for processors of AMD; oneDNN, which torch carries too, has, and is
twice as fast there. torch asks oneDNN only where lower precision is allowed, and oneDNN then keeps all bits unless the
processor has instructions for 16-bit floats that pay (AMX, Arm): which of the two holds is measured, once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

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
