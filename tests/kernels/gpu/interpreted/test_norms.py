"""Norms, rotary embedding and gates in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels import reference
from quantkit.kernels.gpu import norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms(dtype):
    joined, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, 300), (3, 100), (100,)))
    x = joined[:, 100:200]  # a slice of something wider
    found = norms.rms_norm(x, weight, 1e-5, 1.0)
    torch.testing.assert_close(found[0], reference.rms_norm(x, weight, 1e-5, offset=1.0))
    found = norms.rms_norm(x, weight, 1e-5, 0.0, residual)
    for one, other in zip(found, reference.add_rms_norm(x, residual, weight, 1e-5), strict=True):
        torch.testing.assert_close(one, other)
    heads = joined.view(3, 3, 100)[:, 1:]
    torch.testing.assert_close(norms.rms_norm(heads, weight, 1e-5, 0.0)[0], reference.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    joined = torch.randn(2, 5 * 32)
    angles = torch.randn(2, 12)  # 24 of 32 channels rotate
    results = []
    for rotate in (norms.rotary_, reference.rotary_):
        states = joined.clone()
        query, key = states[:, :96].view(2, 3, 32), states[:, 96:].view(2, 2, 32)
        if rotate is norms.rotary_:
            assert rotate(query, key, angles.cos(), angles.sin(), interleaved)
        else:
            rotate(query, key, angles.cos(), angles.sin(), interleaved=interleaved)
        results.append(states)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated(activation):
    x = 3 * torch.randn(2, 2 * 1100)
    torch.testing.assert_close(norms.gated(x, activation), reference.gated(x, activation))
    assert norms.gated(x, "relu") is None
