"""Linears that may round their inputs to int16, against the decoded product: where no kernel does, they are exact."""

from __future__ import annotations

import dataclasses
import platform

import pytest
import torch
from torch.nn import functional

from quantkit.kernels import cpu
from quantkit.kernels.ops.linear import build_linear
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme
from tests.kernels.test_linear import CPU, SCHEMES, SHAPES, inputs, quantized

WITH_ZERO_OF_GROUPS = [("int4", 64, False), ("int4", 256, True), ("int8", 64, False)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def rounds(request, monkeypatch):
    """Whether this machine's kernel rounds inputs; every test here runs with the C kernels and without."""
    if request.param == "torch":
        monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    elif cpu.library() is None:
        pytest.skip(cpu.status())
    return request.param == "native" and platform.machine() == "x86_64" and not cpu.has_avx512()


def rounding(x):
    """The most that rounding may change each input: half of the step of 64 neighbours, 1 / 32767 of their largest."""
    width = x.shape[1]
    blocks = functional.pad(x.double(), (0, -width % 64)).unflatten(1, (-1, 64))
    largest = blocks.abs().amax(2, keepdim=True).expand_as(blocks)
    return (largest / 32767 * 0.5001).flatten(1)[:, :width]


@pytest.mark.parametrize("scheme", [*SCHEMES, *WITH_ZERO_OF_GROUPS], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 512)], ids=str)
def test_the_product_differs_by_what_rounding_changes(scheme, shape, rounds):
    if scheme[1] is not None and shape[1] % scheme[1]:
        pytest.skip("whole groups only")
    weight, bias = quantized(*shape, *scheme), torch.randn(shape[0])
    decoded = weight.dequantize().double()
    exact = build_linear(quantized(*shape, *scheme), bias=bias, dtype=torch.float32, device=CPU)
    linear = build_linear(weight, bias=bias, dtype=torch.float32, device=CPU, rounds_inputs=True)
    for rows in (0, 1, 2, 3, 7, 19, 70):
        x = inputs(rows, shape[1]) * torch.logspace(-3, 3, shape[1])  # each run has a step of its own
        actual, expected = linear(x), x.double() @ decoded.T + bias.double()
        sums = 2.0**-21 * (x.abs().double() @ decoded.abs().T) + 2.0**-23 * expected.abs()
        # A zero point multiplies the sum of the rounded inputs, so its error comes on top.
        bound = rounding(x) @ decoded.abs().T + 8 * sums
        assert ((actual.double() - expected).abs() <= bound).all()
        if rows and shape[0] > 1:
            assert torch.equal(actual, exact(x)) == (not rounds or scheme[0] == "fp8")


@pytest.mark.parametrize("shape", [(70, 37), (3, 2), (65, 131)], ids=str)
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_odd_sizes(shape, name):
    weight = quantized(*shape, name, None, True)
    decoded, x = weight.dequantize().double(), inputs(7, shape[1])
    actual = build_linear(weight, dtype=torch.float32, device=CPU, rounds_inputs=True)(x).double()
    bound = rounding(x) @ decoded.abs().T + 2.0**-20 * (x.abs().double() @ decoded.abs().T)
    assert ((actual - x.double() @ decoded.T).abs() <= bound).all()


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_row_with_nan_or_infinity_gives_nan_and_harms_no_other(name):
    linear = build_linear(quantized(64, 128, name, None, True), dtype=torch.float32, device=CPU, rounds_inputs=True)
    x = inputs(5, 128)
    clean = linear(x)
    x[1, 3], x[3, 7] = torch.nan, -torch.inf
    out = linear(x)
    assert out[1].isnan().all()
    assert not out[3].isfinite().any()
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])


def test_zeros_and_the_smallest_and_largest_inputs():
    weight, bias = quantized(64, 128, "int4", 64, True), torch.randn(64)
    linear = build_linear(weight, bias=bias, dtype=torch.float32, device=CPU, rounds_inputs=True)
    assert torch.equal(
        linear(torch.ones(4, 128) * torch.tensor([[0.0], [1e-45], [1e-39], [1e-35]])), bias.expand(4, -1)
    )
    bare = build_linear(quantized(64, 128, "int4", 64, True), dtype=torch.float32, device=CPU, rounds_inputs=True)
    torch.testing.assert_close(bare(inputs(1, 128) * 1e-28) * 1e28, bare(inputs(1, 128)), rtol=1e-3, atol=1e-3)
    large = linear(inputs(1, 128) * 1e30)
    torch.testing.assert_close(large, linear(inputs(1, 128)).sub(bias) * 1e30, rtol=1e-3, atol=1e26)


@pytest.mark.parametrize("scheme", [("int4", 32, False), ("int4", None, True), ("int8", 64, True)], ids=str)
def test_a_token_gets_the_same_bits_in_any_batch_and_with_any_threads(scheme):
    linear = build_linear(quantized(300, 640, *scheme), dtype=torch.float32, device=CPU, rounds_inputs=True)
    if not linear.description.endswith("(native)"):
        pytest.skip("torch's kernels do not promise it")
    x, before = inputs(263, 640), torch.get_num_threads()
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for rows in (2, 3, 5, 6, 7, 16, 263):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(before)


def test_bfloat16_is_not_rounded_again():
    x = inputs(5, 128, torch.bfloat16)
    linears = [
        build_linear(quantized(64, 128, "int4", 32, True), dtype=torch.bfloat16, device=CPU, rounds_inputs=rounds)
        for rounds in (True, False)
    ]
    assert torch.equal(linears[0](x), linears[1](x))


def test_inputs_with_a_calibrated_scale_are_not_rounded_twice():
    weight, scheme = (
        quantized(64, 128, "int8", None, True),
        ActivationScheme(dtype=DTYPES["int8"], granularity="tensor", dynamic=False),
    )
    weights = [dataclasses.replace(weight, input_scale=torch.tensor(0.02)) for _ in range(2)]
    linears = [
        build_linear(each, activation=scheme, dtype=torch.float32, device=CPU, rounds_inputs=may)
        for each, may in zip(weights, (True, False), strict=True)
    ]
    assert torch.equal(linears[0](inputs(5, 128)), linears[1](inputs(5, 128)))
