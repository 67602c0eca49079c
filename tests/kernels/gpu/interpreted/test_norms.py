"""Norms and gates in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.reference import ops as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms(dtype):
    joined, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, 300), (3, 100), (100,)))
    x = joined[:, 100:200]  # a slice of something wider
    heads = joined.view(3, 3, 100)[:, 1:]
    for given, other, offset in ((x, None, 1.0), (x, residual, 0.0), (heads, None, 0.0)):
        normed, total = gpu_ops.rms_norm(given, weight, 1e-5, offset, other)
        expected, expected_total = reference.rms_norm(given, weight, 1e-5, offset, other)
        torch.testing.assert_close(normed, expected)
        torch.testing.assert_close(total, expected_total)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated(activation):
    x = 3 * torch.randn(2, 2 * 1100)
    torch.testing.assert_close(gpu_ops.gated(x, activation), reference.gated(x, activation))
    assert gpu_ops.gated(x, "relu") is None
