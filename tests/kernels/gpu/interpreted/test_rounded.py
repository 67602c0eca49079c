"""Linears whose inputs are rounded to 8 bits, and the rounding, in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.gpu import quantized_linear, w4a16
from quantkit.kernels.gpu.packing import pack
from quantkit.kernels.gpu.quantize_activations import dequantize_rows, quantize_rows
from quantkit.kernels.reference.ops import quantize_tokens
from quantkit.kernels.types import ActivationQuantization, LinearSource, WrappedLinear
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.affine import to_codes
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme
from tests.kernels.gpu.interpreted.packed import CPU, check, quantized


@pytest.mark.parametrize("step", [None, 0.01])
@pytest.mark.parametrize(("rows", "shape"), [(1, (32, 264)), (5, (32, 264)), (17, (32, 264))])
def test_int8_inputs(rows, shape, step):
    """Few rows packed, more by torch: to the last bit but for the order in which scales are multiplied."""
    weight, bias = quantized("int8", None, True, shape), torch.randn(shape[0])
    activation = activation_of("int8", step)
    linear = make_rounded(weight_with(weight, step), bias, activation)
    assert isinstance(linear, quantized_linear.Int8Linear)
    x = torch.randn(rows, shape[1])
    codes, scale = torch_codes(x, activation, step)
    expected = (codes.double() @ weight.codes.double().T) * scale * weight.scale.double().T + bias
    torch.testing.assert_close(linear(x).double(), expected.double(), rtol=2e-6, atol=1e-5)


def activation_of(name, step, group=None):
    if step is None:
        return ActivationScheme(dtype=DTYPES[name], group_size=group)
    return ActivationScheme(dtype=DTYPES[name], granularity="tensor", dynamic=False)


def weight_with(weight, step):
    return weight if step is None else dataclasses.replace(weight, input_scale=torch.tensor([step]))


def make_rounded(weight, bias, activation):
    return quantized_linear.linear_of(
        LinearSource(weight=weight, bias=bias, activation=activation, dtype=torch.float32, device=CPU)
    )


def torch_codes(x, activation, step):
    """By torch; what cannot be rounded makes the row's scale NaN."""
    if step is None:
        return quantize_tokens(x, activation)
    codes = to_codes(x, torch.tensor(step), None, activation.dtype)
    broken = codes.isnan().any(1, keepdim=True)
    return torch.where(broken, 0.0, codes), torch.where(broken, torch.nan, torch.full((len(x), 1), step))


PACKED, GROUPED = quantized_linear.PackedQuantizedLinear, WrappedLinear
ROUNDED = [
    (("fp8", None, True, (40, 500)), "fp8", None, None),
    (("fp8", None, True, (40, 500)), "fp8", 0.01, None),
    (("int4", 64, True, (32, 256)), "int8", None, None),
    (("int4", 64, True, (32, 256)), "fp8", None, None),
    (("int8", 64, False, (32, 256)), "int8", 0.02, None),
    (("fp8", 128, True, (32, 256)), "fp8", None, 128),
]


@pytest.mark.parametrize("rows", [0, 1, 9, 65])
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_rounded_inputs_of_packed_weights(case, rows):
    """FP8 where the chip has no product for it, fixed steps, groups of inputs, 4 bits by 8."""
    scheme, name, step, group = case
    weight, bias = quantized(*scheme), torch.randn(scheme[3][0])
    activation = activation_of(name, step, group)
    linear = make_rounded(weight_with(weight, step), bias, activation)
    assert isinstance(linear, PACKED if group is None else GROUPED)
    if not rows:
        assert linear(torch.empty(0, scheme[3][1])).shape == (0, scheme[3][0])
        return
    x = torch.randn(rows, scheme[3][1])
    inputs = fake_quantize_inputs(x, activation, None if step is None else torch.tensor([step]))
    check(linear(x), inputs, weight.dequantize(), bias.double())
    x[0, 3] = torch.nan
    out = linear(x[:5])
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


def test_inputs_that_are_not_rounded_to_8_bits():
    weight = quantized("nvfp4", 16, True, (32, 256))
    assert make_rounded(weight, None, ActivationScheme(dtype=DTYPES["mxfp4"], group_size=32)) is None
    assert make_rounded(weight, None, activation_of("fp8", 1.0)) is None  # no scale


@pytest.mark.parametrize("step", [None, 0.01])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_are_rounded_as_by_torch(name, step):
    x = torch.randn(6, 300) * torch.logspace(-6, 3, 6)[:, None]
    x[1], x[2, 5], x[3, 7] = 0.0, torch.nan, torch.inf
    rows, activation = quantize_rows(x, ActivationQuantization(name=name, step=step)), activation_of(name, step)
    codes = rows.codes.view(torch.float8_e4m3fn) if name == "fp8" else rows.codes
    expected, expected_scale = torch_codes(x, activation, step)
    assert torch.equal(codes.float(), expected)
    torch.testing.assert_close(rows.scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    whole = [0, 1, 4, 5]
    values = dequantize_rows(rows, torch.float32)[whole]
    fixed = None if step is None else torch.tensor([step])
    assert torch.equal(values, fake_quantize_inputs(x[whole], activation, fixed))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("scheme", [("int4", 64, False, (24, 256)), ("fp8", 128, True, (24, 256))], ids=str)
def test_products_of_codes(scheme, rows, name):
    """Inputs of 8 bits are read as such."""
    weight, x = quantized(*scheme), torch.randn(rows, 256)
    x[1] = torch.linspace(-1e-3, 1.0, 256)  # subnormals
    rounded_rows = quantize_rows(x, ActivationQuantization(name=name))
    actual = w4a16.multiply(rounded_rows, pack(weight, CPU), None)
    check(actual, fake_quantize_inputs(x, ActivationScheme(dtype=DTYPES[name])), weight.dequantize())


@pytest.mark.parametrize(
    "rounding",
    [
        ActivationQuantization(name="int8"),
        ActivationQuantization(name="fp8"),
        ActivationQuantization(name="fp8", step=0.02),
    ],
)
@pytest.mark.parametrize("width", [100, 512])
def test_norms_and_gates_round_as_a_launch_of_its_own_would(width, rounding):
    """Bit for bit, also where a row cannot be rounded; the sum with the residual is the same."""
    x, residual, weight = (torch.randn(*shape).to(torch.float16) for shape in ((5, width), (5, width), (width,)))
    x[1], residual[1], x[2, 3], x[3, 4] = 0.0, 0.0, torch.nan, torch.inf
    for other in (None, residual):
        rows, total = gpu_ops.rms_norm(x, weight, 1e-5, 1.0, other, rounding)
        normed, expected_total = gpu_ops.rms_norm(x, weight, 1e-5, 1.0, other)
        same_rows(rows, quantize_rows(normed, rounding))
        torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
    gate_up = torch.cat([x, residual], dim=1)
    for activation in ("silu", "gelu_pytorch_tanh"):
        rows = gpu_ops.gated(gate_up, activation, rounding)
        same_rows(rows, quantize_rows(gpu_ops.gated(gate_up, activation), rounding))
    assert gpu_ops.gated(gate_up, "relu", rounding) is None
    assert gpu_ops.gated(gate_up[:0], "silu", rounding).shape == (0, width)


def same_rows(actual, expected):
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.codes, expected.codes)
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_block_rounds_for_linears_that_want_it(parallel, monkeypatch):
    """The same bits as with launches of their own; only where all that read a norm want the same."""
    from quantkit.kernels import gpu, ops
    from quantkit.runtime.model import layers

    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    # Which tensors on the CPU are not given to.
    monkeypatch.setattr(ops, "_on_gpu", lambda x: gpu_ops)
    int8, fp8 = activation_of("int8", None), activation_of("fp8", None)

    def linear(rows, width, activation):
        weight = quantized("int8", None, True, (rows, width))
        return quantized_linear.linear_of(
            LinearSource(weight=weight, activation=activation, dtype=torch.float16, device=CPU)
        )

    class Attention:
        def __init__(self, qkv):
            self.qkv = qkv

        def __call__(self, x, *rest):
            self.seen = x
            return self.qkv(x)

    def run(second, fused):
        def choose(norm, readers):
            return layers_norm_for(norm, readers) if fused else norm

        monkeypatch.setattr(layers, "norm_for", choose)
        torch.manual_seed(0)
        weights = [torch.randn(64).to(torch.float16) for _ in range(2)]
        attention = Attention(linear(64, 64, int8))
        mlp = layers.MLP(linear(128, 64, second), linear(64, 64, int8), "silu", True)
        first, other = (layers.RMSNorm(weight, 1e-5, 0.0) for weight in weights)
        block = layers.Block(
            attention=attention, mlp=mlp, input_norm=first, attention_norm=None, mlp_norm=None if parallel else other,
            output_norm=None, parallel=parallel, scale=1.0, rope=None,
        )  # fmt: skip
        x = torch.randn(3, 64).to(torch.float16)
        return block(x, x, None, None, None), attention.seen

    layers_norm_for = layers.norm_for
    for second in (int8, fp8):
        expected, plain = run(second, False)
        actual, seen = run(second, True)
        assert isinstance(plain, torch.Tensor)
        assert isinstance(seen, torch.Tensor) == (parallel and second is fp8)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
