"""Tensors of the compressed-tensors format: golden words, the library's own bytes, exact round trips, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import REGISTRY, _compressed_tensors_config
from quantkit.formats import compressed_tensors as module
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.tensor import QuantizedTensor
from tests.formats.schemes import SCHEMES, linear, quantize, random_tensor

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "compressed_tensors.json").read_text())
BITS = [bits for bits in (2, 3, 4, 8) if bits != 3 or _compressed_tensors_config._packs_densely()]


def assert_same(left: QuantizedTensor, right: QuantizedTensor) -> None:
    assert left.scheme == right.scheme
    pairs = [(left.codes, right.codes), (left.scale, right.scale), (left.zero_point, right.zero_point)]
    for found, expected in pairs:
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        assert torch.equal(found.float(), expected.float())


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
    found = {name: {"dtype": str(t.dtype), "values": t.tolist()} for name, t in sorted(tensors.items())}
    assert found == case["tensors"]
    assert_same(FORMAT.decode(tensors, scheme), weight)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_those_of_the_library(name, scale_dtype):
    """The library compresses the decoded weight with our scales: the same tensors come out, bit for bit."""
    scheme = SCHEMES[name]
    weight = quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)), scheme.weight, scale_dtype)
    group = FORMAT.config({"a": scheme}, [])["quantization_config"]["config_groups"]["group_0"]
    state = {"weight": weight.dequantize(), "weight_scale": weight.scale.float()}
    if weight.zero_point is not None:
        state["weight_zero_point"] = weight.zero_point
    expected = BaseCompressor.get_value_from_registry(group["format"]).compress(state, QuantizationScheme(**group))
    found = FORMAT.encode(weight, scheme)
    assert found.pop("weight_scale").dtype == scale_dtype
    del expected["weight_scale"]
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key].dtype == expected[key].dtype
        assert found[key].tolist() == expected[key].tolist(), key


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


@pytest.mark.parametrize("name", ["fp8", "fp8-dynamic", "w8a8"])
def test_round_trip_of_unpacked_codes(name):
    scheme = SCHEMES[name]
    for rows, width in [(1, 1), (3, 7), (33, 96)]:
        weight = quantize(torch.randn(rows, width), scheme.weight, torch.bfloat16)
        assert_same(FORMAT.decode(FORMAT.encode(weight, scheme), scheme), weight)


def test_blocks_of_rows_make_no_difference(monkeypatch):
    scheme = SCHEMES["int4-g32-asym"]
    weight = random_tensor(0, (23, 64), scheme.weight, torch.float32)
    whole = FORMAT.encode(weight, scheme)
    monkeypatch.setattr(module, "_BLOCK_CODES", 100)
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
    with pytest.raises(SchemeError, match=r"act_order: weight.*--format dense"):
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
    with pytest.raises(CheckpointError, match=r"'weight_packed' has shape \(4, 8\), its scheme needs \(4, 16\)"):
        FORMAT.decode(tensors, linear("int8", 32))
    with pytest.raises(CheckpointError, match=r"'weight_scale' has shape \(4, 2\), its scheme needs \(4, 1\)"):
        FORMAT.decode(tensors, linear("int4"))
    with pytest.raises(CheckpointError, match="contradicts itself"):
        FORMAT.decode({"weight": torch.zeros(4, 64), "weight_scale": torch.ones(4, 1)}, linear("int8"))


# What cannot be held


@pytest.mark.parametrize(
    "scheme, parts",
    [
        (linear("fp8", 64), ["one scale per channel", "weights.group_size"]),
        (linear("int8", symmetric=False, inputs="int8"), ["symmetric int8 weights", "weights.symmetric"]),
        (linear("int8", 32, inputs="int8"), ["one scale per channel", "weights.group_size"]),
        (linear("int4", 32, inputs="int8"), ["symmetric int8 weights", "weights.dtype"]),
        (linear("int8", inputs="fp8"), ["fp8 activations need fp8 weights", "weights.dtype"]),
        (linear("fp8", inputs="int8"), ["int8 activations do not go with fp8 weights"]),
        (linear("int8", inputs="int4"), ["int4 activations"]),
        (linear("int4", 48), ["weights.group_size", "48 does not divide 64", "nearest that does: 32"]),
    ],
)
def test_check_refuses_and_says_which_field(scheme, parts):
    with pytest.raises(SchemeError) as error:
        FORMAT.check(scheme, (8, 64))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", SCHEMES)
def test_check_accepts(name):
    FORMAT.check(SCHEMES[name], (8, 64))


def test_three_bits_need_dense_packing(monkeypatch):
    monkeypatch.setattr(_compressed_tensors_config, "_packs_densely", lambda: False)
    with pytest.raises(SchemeError, match=r"compressed-tensors>=0\.18.*installed: 0"):
        FORMAT.check(linear("int3", 32), (8, 64))
    FORMAT.check(linear("int2", 32), (8, 64))


def test_the_format_is_registered():
    assert REGISTRY.load("compressed-tensors") is FORMAT
