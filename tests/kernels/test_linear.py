"""build_linear against `x @ decoded.T`: number types, granularities and dtypes, with and without C kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.kernels import cpu, torch_linear
from quantkit.kernels.ops.linear import build_linear, join
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.affine import Ranges, WeightGrid, minmax_parameters, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

CPU = torch.device("cpu")
SCHEMES = [
    ("int4", 32, True),
    ("int4", 128, False),
    ("int4", None, True),
    ("int4", 4, False),
    ("int3", 64, True),
    ("int2", 16, False),
    ("int8", None, True),
    ("int8", None, False),
    ("int8", 64, True),
    ("fp8", None, True),
    ("fp8", 128, True),
]
# (N, K); K is a multiple of every group size above or of none
SHAPES = [(64, 128), (100, 256), (1, 128), (193, 384)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request, monkeypatch):
    """Every test here runs with the C kernels, if this machine has them, and without."""
    if request.param == "torch":
        monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    elif cpu.library() is None:
        pytest.skip(cpu.status())
    return request.param


def quantized(rows, width, name, group_size, symmetric, scale_dtype=torch.float32, seed=0):
    scheme = WeightScheme(dtype=DTYPES[name], group_size=group_size, symmetric=symmetric)
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.1
    weight[:, 0] += 0.3
    scale, zero, *_ = minmax_parameters(weight, WeightGrid(scheme, scale_dtype))
    if symmetric and name.startswith("int"):
        scale[1::2] *= -1  # the range search uses both signs
    return round_to_nearest(weight, WeightGrid(scheme, scale_dtype), Ranges(scale, zero))


def inputs(rows, width, dtype=torch.float32, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(linear, x, weight, bias=None, activation=None, *, slack=2.0**-21):
    """linear(x) is the float64 product of what inputs and codes stand for, up to one rounding of the result.

    `slack` is what accumulation may lose, relative to the sum of the products' magnitudes.
    """
    actual = linear(x)
    assert actual.dtype == x.dtype
    values = (x.float() if activation is None else fake_quantize_inputs(x.float(), activation)).double()
    decoded = (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).double()
    expected = values @ decoded.T + (0 if bias is None else bias.double())
    unit = torch.finfo(x.dtype).eps
    bound = unit * expected.abs() + slack * (values.abs() @ decoded.abs().T) + 1e-30
    assert actual.shape == expected.shape
    error = ((actual.double() - expected).abs() / bound).amax() if len(x) else 0
    assert error <= 1, f"off by {error:.2f} times the bound"


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_the_decoded_product(scheme, shape):
    weight = quantized(*shape, *scheme)
    bias = torch.randn(shape[0])
    linear = build_linear(weight, bias=bias, dtype=torch.float32, device=CPU)
    assert (linear.out_features, linear.in_features) == shape
    for rows in (0, 1, 2, 7, 17):
        check(linear, inputs(rows, shape[1]), weight, bias)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_the_decoded_product(scheme, shape):
    weight = quantized(*shape, *scheme, scale_dtype=torch.bfloat16)
    linear = build_linear(weight, dtype=torch.bfloat16, device=CPU)
    for rows in (0, 1, 6, 17):
        # Without own kernels the weight, or its zeros, are rounded to bfloat16.
        check(linear, inputs(rows, shape[1], torch.bfloat16), weight, slack=2.0**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("scheme", [("int8", None, True), ("fp8", None, True), ("int8", 64, False), ("int4", 32, True)])
def test_inputs_are_rounded_per_token(scheme, name, dtype):
    weight, bias = quantized(100, 256, *scheme), torch.randn(100)
    activation = ActivationScheme(dtype=DTYPES[name])
    linear = build_linear(weight, bias=bias, activation=activation, dtype=dtype, device=CPU)
    slack = 2.0**-21 if dtype == torch.float32 else 2.0**-7
    for rows in (0, 1, 5, 17):
        x = inputs(rows, 256, dtype) * torch.logspace(-3, 3, rows).unsqueeze(1).to(dtype)
        check(linear, x, weight, bias, activation, slack=slack)


@pytest.mark.parametrize("bias", [True, False])
def test_int8_inputs_where_onednn_cuts_sums_off(monkeypatch, bias):
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    monkeypatch.setattr(torch_linear, "_onednn_is_exact", lambda: False)
    weight, bias = quantized(100, 256, "int8", None, True), torch.randn(100) if bias else None
    activation = ActivationScheme(dtype=DTYPES["int8"])
    linear = build_linear(weight, bias=bias, activation=activation, dtype=torch.float32, device=CPU)
    assert "(torch)" in linear.description
    for rows in (0, 1, 17):
        check(linear, inputs(rows, 256), weight, bias, activation)
    largest = dataclasses.replace(weight, codes=torch.full_like(weight.codes, 127))  # sums of pairs overflow 16 bits
    linear = build_linear(largest, bias=bias, activation=activation, dtype=torch.float32, device=CPU)
    check(linear, torch.ones(2, 256), largest, bias, activation)


@pytest.mark.parametrize("activation", [None, "int8", "fp8"])
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_a_row_with_nan_or_infinity_gives_nan_and_harms_no_other(name, activation):
    weight = quantized(64, 128, name, None, True)
    scheme = None if activation is None else ActivationScheme(dtype=DTYPES[activation])
    linear = build_linear(weight, activation=scheme, dtype=torch.float32, device=CPU)
    x = inputs(5, 128)
    clean = linear(x)
    x[1, 3], x[3, 7] = torch.nan, torch.inf
    out = linear(x)
    assert out[1].isnan().all()
    assert not out[3].isfinite().any()
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])


def test_a_row_of_zeros_gives_the_bias():
    weight, bias = quantized(64, 128, "int8", None, True), torch.randn(64)
    linear = build_linear(
        weight, bias=bias, activation=ActivationScheme(dtype=DTYPES["int8"]), dtype=torch.float32, device=CPU
    )
    assert torch.equal(linear(torch.zeros(2, 128)), bias.expand(2, -1))


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_groups_may_be_formed_in_any_order(name):
    weight = quantized(70, 128, name, 32, True)
    index = torch.randperm(128, generator=torch.Generator().manual_seed(3)) // 32
    weight = dataclasses.replace(weight, group_index=index)
    uneven = dataclasses.replace(weight, group_index=(torch.arange(128) % 5).clamp(max=3))
    for activation in (None, ActivationScheme(dtype=DTYPES["int8"])):
        for case in (weight, uneven):
            linear = build_linear(case, activation=activation, dtype=torch.float32, device=CPU)
            check(linear, inputs(3, 128), case, None, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (100, 37), (1, 1), (130, 514)], ids=str)
def test_dense(shape, dtype):
    weight = inputs(*shape, dtype, seed=2)
    bias = torch.randn(shape[0]).to(dtype)
    linear = build_linear(weight.clone(), bias=bias, dtype=dtype, device=CPU)
    for rows in (0, 1, 3, 16, 33):
        check(linear, inputs(rows, shape[1], dtype), weight, bias)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_in_16_bits_is_not_rounded_for_float32(stored, kernels):
    weight = inputs(70, 129, stored, seed=2)
    linear = build_linear(weight.clone(), dtype=torch.float32, device=CPU)
    for rows in (1, 9):
        check(linear, inputs(rows, 129), weight)
    if kernels == "native":
        assert linear.stored_bytes == 128 * 130 * 2


def test_inputs_of_another_dtype_or_stride_are_taken():
    weight = quantized(64, 128, "int4", 32, True)
    linear = build_linear(weight, dtype=torch.bfloat16, device=CPU)
    x = inputs(6, 128, torch.bfloat16)
    assert torch.equal(linear(x.float()).bfloat16(), linear(x))
    assert linear(x.float()).dtype == torch.float32
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(linear(wide[:, :128]), linear(x))
    assert torch.equal(linear(x.t().contiguous().t()), linear(x))


def test_joined_weights_give_the_joined_outputs():
    parts = [quantized(rows, 128, "int4", 32, False, seed=rows) for rows in (64, 16, 17)]
    x = inputs(3, 128)
    expected = torch.cat([build_linear(p, dtype=torch.float32, device=CPU)(x) for p in parts], dim=1)
    fused = join(parts)
    assert fused.shape == (97, 128)
    torch.testing.assert_close(build_linear(fused, dtype=torch.float32, device=CPU)(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(join([torch.ones(2, 3), torch.zeros(1, 3)]), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))


def test_what_cannot_be_one_weight_is_not_joined():
    one = quantized(64, 128, "int4", 32, True)
    assert join([one, quantized(64, 128, "int4", 64, True)]) is None
    assert join([one, quantized(64, 128, "int4", 32, False)]) is None
    assert join([one, quantized(64, 128, "int8", 32, True)]) is None
    assert join([one, torch.ones(64, 128)]) is None
    assert join([one, dataclasses.replace(one, group_index=torch.arange(128) % 4)]) is None
    assert join([torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bfloat16)]) is None
    assert join([torch.ones(4, 8), torch.ones(4, 9)]) is None


@pytest.mark.parametrize("scheme", [("int4", None, True), ("int8", None, False), ("fp8", None, True)], ids=str)
@pytest.mark.parametrize("activation", [None, "int8", "fp8"])
@pytest.mark.parametrize("shape", [(70, 37), (3, 2), (65, 131)], ids=str)
def test_odd_sizes(shape, activation, scheme):
    weight, bias = quantized(*shape, *scheme), torch.randn(shape[0])
    scheme = None if activation is None else ActivationScheme(dtype=DTYPES[activation])
    linear = build_linear(weight, bias=bias, activation=scheme, dtype=torch.float32, device=CPU)
    for rows in (1, 4, 7, 13):
        check(linear, inputs(rows, shape[1]), weight, bias, scheme)


def every_code(name):
    """A weight (N, 256) whose rows hold each code of the number type; scale 1."""
    kind = DTYPES[name]
    if kind.kind == "float":
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[codes & 127 != 127].view(kind.storage)
    else:
        codes = torch.arange(kind.minimum, kind.maximum + 1).to(torch.int8)
    rows = codes.view(torch.uint8).repeat(256)[: 256 * 256].view(256, -1).view(codes.dtype)
    scheme = WeightScheme(dtype=kind)
    return QuantizedTensor(codes=rows, scale=torch.ones(256, 1), zero_point=None, scheme=scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_every_code_is_decoded_exactly(name, dtype):
    weight = every_code(name)
    width = weight.shape[1]
    linear = build_linear(weight, dtype=dtype, device=CPU)
    expected = weight.dequantize(dtype).T
    assert torch.equal(linear(torch.eye(width, dtype=dtype)), expected)
    assert torch.equal(linear(torch.eye(width, dtype=dtype)[5:6]), expected[5:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("weight_name", ["int8", "fp8"])
def test_inputs_are_rounded_to_the_very_same_values(weight_name, name, dtype):
    activation = ActivationScheme(dtype=DTYPES[name])
    weight = QuantizedTensor(
        codes=torch.eye(128).to(DTYPES[weight_name].storage),
        scale=torch.ones(128, 1),
        zero_point=None,
        scheme=WeightScheme(dtype=DTYPES[weight_name]),
    )
    linear = build_linear(weight, activation=activation, dtype=dtype, device=CPU)
    x = (inputs(40, 128) * torch.logspace(-9, 9, 40).unsqueeze(1)).to(dtype)
    assert torch.equal(linear(x), fake_quantize_inputs(x, activation))


def test_float8_weights_may_hold_nan():
    weight = quantized(64, 128, "fp8", None, True)
    weight.codes.view(torch.uint8)[3, 5] = 0x7F
    out = build_linear(weight, dtype=torch.float32, device=CPU)(inputs(2, 128))
    assert out[:, 3].isnan().all()
    assert out.isnan().sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scheme", "activation"),
    [
        (("int4", 16, True), None),
        (("int4", 32, False), None),
        (("int4", None, True), None),
        (("int8", None, True), None),
        (("fp8", 128, True), None),
        (("int8", None, True), "int8"),
        (("int4", 64, True), "int8"),
        (None, None),
    ],
    ids=str,
)
def test_a_token_gets_the_same_bits_in_any_batch(scheme, activation, dtype, kernels):
    if kernels == "torch":
        pytest.skip("torch's kernels do not promise it")
    weight = inputs(200, 640, dtype, seed=2) if scheme is None else quantized(200, 640, *scheme)
    scheme = None if activation is None else ActivationScheme(dtype=DTYPES[activation])
    linear = build_linear(weight, activation=scheme, dtype=dtype, device=CPU)
    x = inputs(263, 640, dtype)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for rows in (2, 5, 6, 7, 16, 263):
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("activation", [None, "int8"])
def test_threads_do_not_change_the_result(activation, kernels):
    if kernels == "torch":
        pytest.skip("torch's kernels do not promise it")
    scheme = None if activation is None else ActivationScheme(dtype=DTYPES[activation])
    linear = build_linear(quantized(300, 512, "int8", 128, True), activation=scheme, dtype=torch.float32, device=CPU)
    x, before = inputs(20, 512), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append((linear(x), linear(x[:2])))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_the_description_names_kernel_and_number_type(kernels):
    linear = build_linear(quantized(64, 128, "int4", 32, True), dtype=torch.bfloat16, device=CPU)
    assert linear.description == f"int4 g32 ({kernels})"
    # 4 bits a code and, at 32 inputs per scale, 32 bits a scale, or two of 16
    assert linear.stored_bytes == 64 * 128 // 2 + 64 * 4 * 4


def test_inputs_of_another_width_are_refused():
    linear = build_linear(quantized(64, 128, "int8", None, True), dtype=torch.float32, device=CPU)
    for width in (127, 129):
        with pytest.raises((ValueError, RuntimeError)):
            linear(inputs(2, width))


@pytest.mark.parametrize("rows", [64, 128, 256, 1024])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_weight_whose_rows_do_not_lie_one_after_another_is_the_same(name, rows):
    weight = quantized(rows, 2 * rows, name, 32, True)
    turned = dataclasses.replace(weight, codes=weight.codes.t().contiguous().t())
    x = inputs(3, 2 * rows)
    expected = build_linear(weight, dtype=torch.float32, device=CPU)(x)
    torch.testing.assert_close(build_linear(turned, dtype=torch.float32, device=CPU)(x), expected, rtol=1e-4, atol=1e-3)
