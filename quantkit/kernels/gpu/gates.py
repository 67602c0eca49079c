# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201
"""Gates inside kernels: activation(gate) * up, for feed-forward layers and experts."""

from __future__ import annotations

import triton
import triton.language as tl

GATES = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1}
"""Activations that gates have, by their name in config.json: how kernels number them."""


@triton.jit
def gated_product(gate, up, GATE: tl.constexpr):
    """activation(gate) * up of float32 numbers."""
    if GATE == 0:
        opened = gate * tl.sigmoid(gate)
    else:  # (1 + tanh z) / 2 = sigmoid(2 z)
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return opened * up


@triton.jit
def load_gated(x, row, columns, width, GATE: tl.constexpr):
    """activation(gate) * up of a row with gates first, in the dtype of x."""
    gate = tl.load(x + row * 2 * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return gated_product(gate, up, GATE).to(x.dtype.element_ty)
