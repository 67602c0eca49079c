"""Small operations against their definitions in float64, in every dtype, and on slices of larger tensors."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.kernels import cpu, ops
from quantkit.kernels.cpu import ops as _native_ops

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = pytest.mark.parametrize("dtype", list(BOUND), ids=str)
WIDTHS = pytest.mark.parametrize("width", [8, 48, 96, 100, 2048])
ROWS = pytest.mark.parametrize("rows", [0, 1, 5])


@pytest.fixture(params=["native", "torch"], autouse=True)
def implementation(request, monkeypatch):
    """Every test runs with the C kernels and with the reference."""
    if request.param == "torch":
        monkeypatch.setattr(_native_ops, "_functions", lambda: None)
    elif cpu.library() is None:
        pytest.skip(cpu.status())


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual, exact, dtype, slack=1.01, sums=3e-6):
    """Within half a unit of the dtype of what float64 gives, plus a little for float32 sums."""
    assert actual.dtype is dtype
    assert actual.shape == exact.shape
    bound = exact.abs() * BOUND[dtype] * slack + sums
    assert ((actual.double() - exact).abs() <= bound).all()


@DTYPES
@WIDTHS
@ROWS
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype, width, rows, offset):
    x, weight = draw(rows, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    before = x.clone()
    assert_rounded(ops.rms_norm(x, weight, 1e-5, offset)[0], exact, dtype)
    assert torch.equal(x, before)


@DTYPES
def test_rms_norm_of_heads(dtype):
    """Three dimensions, on a slice of a fused projection, as q and k norms use it."""
    fused = draw(5, 12 * 16, dtype=dtype)
    x, weight = fused[:, 32:96].view(5, 4, 16), draw(16, dtype=dtype, seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_rounded(ops.rms_norm(x, weight, 1e-6)[0], exact, dtype)


@DTYPES
@WIDTHS
@ROWS
def test_rms_norm_of_a_sum(dtype, width, rows):
    x, residual, weight = (
        draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, width), (rows, width), (width,)])
    )
    normed, total = ops.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5)[0])


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (64, 64), (80, 32), (128, 128), (8, 4)])
def test_rotary(dtype, interleaved, dim, rotated):
    """A pair (a, b) becomes the complex product (a + ib) e^(i angle); channels past R stay as they are."""
    fused = draw(5, 8 * dim, dtype=dtype)
    query, key = fused[:, : 4 * dim].view(5, 4, dim), fused[:, 4 * dim : 6 * dim].view(5, 2, dim)
    angles = draw(5, rotated // 2, seed=1) * 7
    expected = []
    for states in (query, key):
        turned, exact = states[..., :rotated].double(), states.double().clone()
        pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
        angle = angles.double().unsqueeze(1)
        product = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(angle.cos(), angle.sin())
        back = torch.stack([product.real, product.imag], -1)
        exact[..., :rotated] = (back if interleaved else back.transpose(-1, -2)).flatten(-2)
        expected.append(exact)
    rest = fused[:, 6 * dim :].clone()
    result = ops.rotary_(query, key, angles.cos(), angles.sin(), interleaved=interleaved)
    assert result[0] is query
    assert result[1] is key
    for actual, exact in zip(result, expected, strict=True):
        assert_rounded(actual, exact, dtype)
    assert torch.equal(fused[:, 6 * dim :], rest)


FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: max(x, 0) ** 2,
}


@DTYPES
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("width", [6, 96, 200])
@ROWS
def test_gated(dtype, name, width, rows):
    gate_up = draw(rows, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate.clone().apply_(FORMULAS[name]) * up
    assert_rounded(ops.gated(gate_up, name), exact, dtype, sums=2e-5)  # 1 + erf(x) cancels for x < 0
    assert_rounded(ops.activate(gate_up[:, :width], name), gate.clone().apply_(FORMULAS[name]), dtype)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_survives_large_gates(name):
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    assert ops.gated(gate_up, name).tolist() == [[0.0, 0.0, 180.0, 2e4]]
