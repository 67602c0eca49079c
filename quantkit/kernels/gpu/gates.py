# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201
"""Gated activations inside kernels: activation(gate) * up, for feed-forward layers and experts."""

import triton
import triton.language as tl

GATES = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1}
"""The number that stands for each supported gate activation in the kernels, keyed by name in config.json."""


@triton.jit
def gated_product(gate, up, GATE: tl.constexpr):
    """Compute activation(gate) * up for float32 numbers."""
    if GATE == 0:
        opened = gate * tl.sigmoid(gate)
    else:  # (1 + tanh z) / 2 = sigmoid(2 z)
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return opened * up


@triton.jit
def load_gated(x, row, columns, width, GATE: tl.constexpr):
    """Load a row whose first half holds the gates, and compute activation(gate) * up in the dtype of x."""
    gate = tl.load(x + row * 2 * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return gated_product(gate, up, GATE).to(x.dtype.element_ty)


@triton.jit
def outputs_of(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the output indices of a product's tile, and a mask of the indices that exist. If GATED, each gate is
    followed by its up output.
    """
    lanes = tl.arange(0, BLOCK_N)
    if GATED:
        column = tile * (BLOCK_N // 2) + lanes // 2
        return column + (lanes % 2) * (N // 2), column < N // 2
    outputs = tile * BLOCK_N + lanes
    return outputs, outputs < N


@triton.jit
def store_gated(
    sums, out, rows, has_row, tile, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """Store activation(gate) * up of a tile (ROWS, BLOCK_N), rounded at the same points as in two separate launches."""
    kind = out.dtype.element_ty
    gate, up = tl.split(tl.reshape(sums.to(kind).to(tl.float32), (ROWS, BLOCK_N // 2, 2)))
    columns = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = out + rows.to(tl.int64)[:, None] * (N // 2) + columns[None, :]
    mask = has_row[:, None] & (columns < N // 2)[None, :]
    tl.store(at, gated_product(gate, up, GATE).to(kind), mask=mask)
