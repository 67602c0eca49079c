# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""INT8 inputs times INT8 weights as they lie, for the shapes that `torch._int_mm` refuses; scales in the same launch.

Sums are exact, so outputs are those of `torch._int_mm` and `quantize_activations.scale_sums`, to the last bit.
Shapes: M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.types import QuantizedActivations

# By rows, the last for all that are more: a guess, not yet run on a GPU. Few rows read wide pieces of K at once.
_TILES = {
    16: {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4},
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4},
    128: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8},
}


@triton.jit
def _int8_kernel(
    x, codes, row_scale, scale, bias, out, M, N, K,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M x BLOCK_N outputs; neighbouring programs share the weight."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    kept = (rows < M)[:, None] & (outputs < N)[None, :]
    left = x + rows.to(tl.int64)[:, None] * K + lanes[None, :]
    right = codes + outputs.to(tl.int64)[None, :] * K + lanes[:, None]
    # Integers, so that sums are exact in whatever order.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        inside = start + lanes < K
        a = tl.load(left + start, mask=(rows < M)[:, None] & inside[None, :], other=0)
        b = tl.load(right + start, mask=(outputs < N)[None, :] & inside[:, None], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    value = total.to(tl.float32) * tl.load(scale + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    value *= tl.load(row_scale + rows, mask=rows < M, other=0.0)[:, None]
    if HAS_BIAS:
        value += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + outputs[None, :], value.to(out.dtype.element_ty), mask=kept)


def multiply_int8(rows: QuantizedActivations, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """rows @ codes.T, with the scales of both and a bias.

    Args:
        rows: int8.
        codes: (N, K) int8 contiguous.
        scale: N numbers.
        bias: (N,) or None.
    Returns:
        (M, N) in the dtype of the rows.
    """
    count, (outputs, width) = len(rows), codes.shape
    tile = _TILES[next((rows for rows in _TILES if count <= rows), 128)]
    out = torch.empty(count, outputs, dtype=rows.dtype, device=codes.device)
    _int8_kernel[(-(-count // tile["BLOCK_M"]), -(-outputs // tile["BLOCK_N"]))](
        rows.codes, codes, rows.scale, scale, bias, out, count, outputs, width,
        HAS_BIAS=bias is not None, **tile, num_stages=3,
    )  # fmt: skip
    return out
