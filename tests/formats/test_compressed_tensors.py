"""Tensors of the compressed-tensors format: golden words, the library's own bytes, exact round trips, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import REGISTRY, _compressed_tensors_layout, _packing
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.tensor import QuantizedTensor
from tests.formats.schemes import SCHEMES, linear, quantize, random_tensor, with_input

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "compressed_tensors.json").read_text())
BITS = [bits for bits in (2, 3, 4, 8) if bits != 3 or _compressed_tensors_layout.packs_densely()]


def assert_same(left: QuantizedTensor, right: QuantizedTensor) -> None:
    assert left.scheme == right.scheme
    pairs = [(left.codes, right.codes), (left.scale, right.scale), (left.zero_point, right.zero_point)]
    for actual, expected in pairs:
        if expected is None:
            assert actual is None
            continue
        assert actual is not None
        assert actual.dtype == expected.dtype
        assert actual.is_contiguous()
        assert torch.equal(actual.float(), expected.float())


# Tensors


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN["cases"] if case["bits"] in BITS],
    ids=lambda case: f"int{case['bits']}-{case['symmetric']}",
)
def test_golden_words(case):
    scheme = linear(f"int{case['bits']}", case["group_size"], symmetric=case["symmetric"])
    zero = case["zero_point"]
    weight = QuantizedTensor(
        codes=torch.tensor(case["codes"], dtype=torch.int8),
        scale=torch.tensor(case["scale"]),
        zero_point=None if zero is None else torch.tensor(zero, dtype=torch.int8),
        scheme=scheme.weight,
    )
    tensors = FORMAT.encode(weight, scheme)
    actual = {name: {"dtype": str(t.dtype), "values": t.tolist()} for name, t in sorted(tensors.items())}
    assert actual == case["tensors"]
    assert_same(FORMAT.decode(tensors, scheme), weight)


def library_state(values: torch.Tensor, weight: QuantizedTensor) -> dict[str, torch.Tensor]:
    """What the library compresses: the original values, and scales as it shapes them."""
    rows, scale = weight.scheme.block_rows, weight.scale.float()
    scale = scale[:1].reshape(1) if rows is None else scale[::rows]
    state = {"weight": values, "weight_scale": scale}
    if weight.global_scale is not None:
        state |= {"weight_scale": scale * weight.global_scale, "weight_global_scale": weight.global_scale}
    if weight.zero_point is not None:
        state["weight_zero_point"] = weight.zero_point
    return state


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_those_of_the_library(name, scale_dtype):
    """The library compresses the same weight with our scales: the same tensors come out, bit for bit."""
    scheme, values = SCHEMES[name], torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight = quantize(values, scheme.weight, scale_dtype)
    group = FORMAT.config({"a": scheme}, [])["quantization_config"]["config_groups"]["group_0"]
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    expected = compressor.compress(library_state(values, weight), QuantizationScheme(**group))
    actual = FORMAT.encode(with_input(weight, scheme), scheme)
    if scheme.weight.dtype.scale == "float":
        assert actual["weight_scale"].dtype == scale_dtype
    for key in expected:
        reference = expected[key] if key != "weight_scale" else expected[key].to(actual[key].dtype)
        assert actual[key].dtype == reference.dtype
        assert actual[key].shape == reference.shape
        assert torch.equal(*(t.flatten().clone().view(torch.uint8) for t in (actual[key], reference))), key
    assert set(actual) - set(expected) <= {"input_scale", "input_global_scale"}


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_are_those_of_the_library(name):
    """Scales of the covering range, bit for bit, from the library's own arithmetic."""
    args = QuantizationScheme(
        **FORMAT.config({"a": SCHEMES[name]}, [])["quantization_config"]["config_groups"]["group_0"]
    )
    scheme, weights = SCHEMES[name].weight, args.weights
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    if scheme.symmetric:  # else the library divides by zero and keeps the zero point of NaN
        weight[2, :32] = 0
    blocks = weight.view(24, -1, scheme.group_width(64))
    if scheme.block_rows != 1:
        rows = scheme.block_rows or 24
        blocks = weight.view(24 // rows, rows, -1, scheme.group_width(64)).transpose(1, 2).flatten(2)
    outer = generate_gparam(weight.min(), weight.max()) if scheme.dtype.scale == "e4m3" else None
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, global_scale=outer)
    actual = quantize(weight, scheme)
    expected = (scale if outer is None else scale / outer).repeat_interleave(24 // scale.shape[0], dim=0)
    assert torch.equal(actual.scale, expected)
    assert actual.zero_point is None or torch.equal(actual.zero_point, zero)
    assert outer is None or torch.equal(actual.global_scale, outer)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_round_trip_is_exact(bits, symmetric):
    seed = 0
    for rows, width, group_size in [(1, 1, None), (3, 7, None), (5, 33, 11), (33, 96, 32), (64, 40, 40), (31, 65, 1)]:
        for dtype in (torch.float32, torch.bfloat16):
            seed += 1
            scheme = linear(f"int{bits}", group_size, symmetric=symmetric)
            weight = random_tensor(seed, (rows, width), scheme.weight, dtype)
            assert_same(FORMAT.decode(FORMAT.encode(weight, scheme), scheme), weight)


@pytest.mark.parametrize("name", [name for name in SCHEMES if not name.startswith("int")])
def test_round_trip_of_other_codes(name):
    scheme = SCHEMES[name]
    grouped = scheme.weight.group_size is not None
    for rows, width in [(8, 32), (48, 96)] if grouped else [(1, 1), (3, 7), (33, 96)]:
        weight = with_input(quantize(torch.randn(rows, width), scheme.weight, torch.bfloat16), scheme)
        back = FORMAT.decode(FORMAT.encode(weight, scheme), scheme)
        assert_same(back, weight)
        for one, other in ((back.input_scale, weight.input_scale), (back.global_scale, weight.global_scale)):
            assert one is other or torch.equal(one, other)


def test_blocks_of_rows_make_no_difference(monkeypatch):
    scheme = SCHEMES["int4-g32-asym"]
    weight = random_tensor(0, (23, 64), scheme.weight, torch.float32)
    whole = FORMAT.encode(weight, scheme)
    monkeypatch.setattr(_packing, "_BLOCK_VALUES", 100)
    parts = FORMAT.encode(weight, scheme)
    assert torch.equal(whole["weight_packed"], parts["weight_packed"])
    assert_same(FORMAT.decode(parts, scheme), weight)


def test_naive_layout_of_other_tools_is_read():
    scheme = linear("int8", 16, symmetric=False)
    weight = random_tensor(0, (6, 32), scheme.weight, torch.float32)
    assert weight.zero_point is not None
    tensors = {"weight": weight.codes, "weight_scale": weight.scale, "weight_zero_point": weight.zero_point}
    assert_same(FORMAT.decode(tensors, scheme), weight)


def test_activation_order_is_refused():
    scheme = SCHEMES["int4-g32"]
    weight = random_tensor(0, (4, 64), scheme.weight, torch.float32)
    ordered = QuantizedTensor(
        codes=weight.codes, scale=weight.scale, zero_point=None, scheme=scheme.weight, group_index=torch.arange(64) % 2
    )
    with pytest.raises(SchemeError, match=r"act_order=weight.*--format dense"):
        FORMAT.encode(ordered, scheme)
    with pytest.raises(SchemeError, match="activation order"):
        FORMAT.decode({**FORMAT.encode(weight, scheme), "weight_g_idx": torch.arange(64)}, scheme)


@pytest.mark.parametrize("missing", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"])
def test_a_missing_tensor_is_named(missing):
    scheme = SCHEMES["int4-g32-asym"]
    tensors = FORMAT.encode(random_tensor(0, (4, 64), scheme.weight, torch.float32), scheme)
    del tensors[missing]
    with pytest.raises(CheckpointError, match="no tensor 'weight" if missing == "weight_packed" else missing):
        FORMAT.decode(tensors, scheme)


def test_tensors_that_contradict_the_scheme():
    scheme = SCHEMES["int4-g32"]
    tensors = FORMAT.encode(random_tensor(0, (4, 64), scheme.weight, torch.float32), scheme)
    with pytest.raises(CheckpointError, match=r"'weight_packed' has shape \(4, 8\), but its scheme needs \(4, 16\)"):
        FORMAT.decode(tensors, linear("int8", 32))
    with pytest.raises(CheckpointError, match=r"'weight_scale' has shape \(4, 2\), but its scheme needs \(4, 1\)"):
        FORMAT.decode(tensors, linear("int4"))
    with pytest.raises(CheckpointError, match="requires a matrix of"):
        FORMAT.decode({"weight": torch.zeros(4, 64), "weight_scale": torch.ones(4, 1)}, linear("int8"))


# What cannot be held


@pytest.mark.parametrize(
    "scheme, parts",
    [
        (linear("fp8", 64), ["one scale per channel, tensor or block", "weights.group_size"]),
        (linear("int8", symmetric=False, inputs="int8"), ["int8 channel asym", "weights.group_size"]),
        (linear("int8", 32, inputs="int8"), ["weights.group_size 'channel'"]),
        (linear("int4", 32, symmetric=False, inputs="int8"), ["int4 g32 asym", "symmetric int4"]),
        (linear("int3", 32, inputs="int8"), ["int3 g32", "weights.dtype"]),
        (linear("int4", 32, inputs="int8", static=True), ["dynamic"]),
        (linear("int8", inputs="fp8"), ["set weights.dtype to fp8, or to symmetric int4"]),
        (linear("fp8", inputs="int8"), ["int8 activations cannot be combined with fp8 weights"]),
        (linear("int8", inputs="int4"), ["int4 per token activations", "set activations.dtype to int8"]),
        (linear("int4", rows=None), ["int4 tensor", "weights.group_size"]),
        (linear("fp8", inputs="fp8", input_group=32), ["weights.group_size to 32x32"]),
        (linear("fp8", 16, inputs="fp8", rows=8), ["set activations.group_size to 16"]),
        (linear("fp8", 16, rows=5), ["blocks of 5 outputs do not divide the 8 outputs", "weights.group_size"]),
        (linear("fp8", 48, rows=8), ["48 does not divide 64"]),
        (linear("nvfp4", inputs="fp8"), ["fp8 activations cannot be combined with nvfp4 weights"]),
        (linear("mxfp4", inputs="int8"), ["set activations.dtype to mxfp4"]),
        (linear("int4", 48), ["weights.group_size", "48 does not divide 64", "to 64 or 32 or channel"]),
    ],
)
def test_check_refuses_and_says_which_field(scheme, parts):
    with pytest.raises(SchemeError) as error:
        FORMAT.check(scheme, (8, 64))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", SCHEMES)
def test_check_accepts(name):
    assert FORMAT.check(SCHEMES[name], (8, 64)) is None


def test_three_bits_need_dense_packing(monkeypatch):
    monkeypatch.setattr(_compressed_tensors_layout, "packs_densely", lambda: False)
    with pytest.raises(SchemeError, match=r"compressed-tensors>=0\.18.*installed: 0"):
        FORMAT.check(linear("int3", 32), (8, 64))
    FORMAT.check(linear("int2", 32), (8, 64))


@pytest.mark.parametrize(("name", "size"), [("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)])
def test_inputs_that_blocks_do_not_divide_are_refused(name, size):
    with pytest.raises(
        SchemeError, match=rf"weights.group_size: {name} has a scale per {size} inputs, which do not divide 72"
    ):
        FORMAT.check(linear(name), (8, 72))


def test_a_type_with_its_own_groups_takes_no_others():
    with pytest.raises(SchemeError, match=r"nvfp4 has a scale per 16 inputs; set weights\.group_size to 16"):
        linear("nvfp4", 32)
    with pytest.raises(SchemeError, match="mxfp4 activations have a scale per 32 inputs"):
        linear("mxfp4", inputs="mxfp4", input_group=16)


def test_a_library_that_does_not_know_a_type_is_named(monkeypatch):
    monkeypatch.setattr(_compressed_tensors_layout, "library_formats", lambda: ("pack-quantized",))
    with pytest.raises(SchemeError, match=r"mxfp8 needs a newer compressed-tensors \(installed: \d"):
        FORMAT.check(linear("mxfp8"), (8, 64))


@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp8-static", "nvfp4-a4"])
def test_a_scale_of_the_input_that_is_none_is_refused(name, value):
    scheme = SCHEMES[name]
    weight = quantize(torch.randn(8, 64), scheme.weight)
    with pytest.raises(SchemeError, match="need a calibrated scale"):
        FORMAT.encode(weight, scheme)
    tensors = FORMAT.encode(with_input(weight, scheme), scheme)
    key = next(key for key in tensors if key.startswith("input"))
    if value is None:
        del tensors[key]
    else:
        tensors[key] = torch.tensor([value])
    with pytest.raises(CheckpointError, match=key):
        FORMAT.decode(tensors, scheme)


def test_scales_that_are_not_of_the_type_are_not_written():
    for name, message in (("nvfp4", "8-bit scales times a global scale"), ("mxfp4", "powers of two")):
        weight = quantize(torch.randn(8, 64), SCHEMES[name].weight)
        with pytest.raises(SchemeError, match=message):
            FORMAT.encode(replace(weight, scale=weight.scale * 1.01), SCHEMES[name])


def test_the_format_is_registered():
    assert REGISTRY.load("compressed-tensors") is FORMAT
