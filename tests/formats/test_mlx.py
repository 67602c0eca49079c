"""MLX's layout against a plain unpacker and, if it is installed, against MLX itself; what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats.mlx import FORMAT
from quantkit.numerics.tensor import QuantizedTensor
from tests.formats.schemes import linear, random_tensor

BITS = (2, 3, 4, 5, 6, 8)


def plain_values(stored, bits: int, group_size: int) -> np.ndarray:
    """The values of a weight, one code at a time, from the layout that MLX documents: a row is one stream of bits."""
    words, scales, biases = (stored[name].numpy() for name in ("weight", "scales", "biases"))
    assert (words.dtype, scales.dtype, biases.dtype) == (np.uint32, np.float32, np.float32)
    rows = []
    for row, row_scales, row_biases in zip(words, scales, biases, strict=True):
        stream = sum(int(word) << (32 * number) for number, word in enumerate(row))
        codes = [(stream >> (bits * at)) & ((1 << bits) - 1) for at in range(len(row) * 32 // bits)]
        rows.append(
            [
                row_scales[at // group_size] * np.float32(code) + row_biases[at // group_size]
                for at, code in enumerate(codes)
            ]
        )
    return np.array(rows, np.float32)


@pytest.fixture(params=BITS)
def case(request):
    """A weight with every code and zero point, in each number of bits, and its stored tensors."""
    size = (32, 64, 128)[request.param % 3]
    scheme = linear(f"int{request.param}", size, symmetric=False)
    dtype = torch.float16 if request.param % 2 else torch.bfloat16
    weight = random_tensor(request.param, (8, 256), scheme.weight, dtype)
    weight.scale[1::2] *= -1
    return scheme, weight, FORMAT.encode(weight, scheme)


def test_values_equal_ours_exactly(case):
    scheme, weight, stored = case
    values = plain_values(stored, scheme.weight.dtype.bits, scheme.weight.group_size)
    assert np.array_equal(values, weight.dequantize(torch.float32).numpy())


def test_mlx_gives_the_same_values(case):
    mx = pytest.importorskip("mlx.core")
    scheme, weight, stored = case
    parts = [mx.array(stored[name].numpy()) for name in ("weight", "scales", "biases")]
    values = mx.dequantize(*parts, group_size=scheme.weight.group_size, bits=scheme.weight.dtype.bits)
    assert np.array_equal(np.array(values), weight.dequantize(torch.float32).numpy())


def test_three_bits_are_packed_as_mlx_packs_them():
    """`mx.quantize` of MLX 0.32.4 makes these bytes, scale -1 and bias 7 of the values 0 to 7, four times in a row."""
    values = torch.arange(32) % 8
    weight = QuantizedTensor(
        codes=(7 - values - 4).to(torch.int8).view(1, -1),
        scale=torch.full((1, 1), -1.0, dtype=torch.float16),
        zero_point=torch.full((1, 1), 3, dtype=torch.int8),
        scheme=linear("int3", 32, symmetric=False).weight,
    )
    assert torch.equal(weight.dequantize().view(-1), values.float())
    stored = FORMAT.encode(weight, linear("int3", 32, symmetric=False))
    assert stored["weight"].view(torch.uint8).flatten().tolist() == [0x77, 0x39, 0x05] * 4
    assert (stored["scales"].item(), stored["biases"].item()) == (-1.0, 7.0)


def test_decoding_returns_codes_and_zero_points(case):
    scheme, weight, stored = case
    again = FORMAT.decode(stored, scheme)
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.zero_point, weight.zero_point)
    assert torch.equal(again.scale, weight.scale.float())
    FORMAT.check_encoded("a.b", weight, scheme, stored)


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_biases_that_are_no_multiples_of_scales_are_refused(case, factor):
    scheme, _, stored = case
    with pytest.raises(SchemeError, match="not -scale times a whole number"):
        FORMAT.decode({**stored, "biases": stored["biases"] * factor}, scheme)
    beyond = stored["scales"] * -float(1 << scheme.weight.dtype.bits)
    with pytest.raises(SchemeError, match="not -scale times a whole number"):
        FORMAT.decode({**stored, "biases": beyond}, scheme)


REFUSED = [
    (linear("fp8"), "integers of 2, 3, 4, 5, 6 or 8 bits"),
    (linear("mxfp4"), "integers of 2, 3, 4, 5, 6 or 8 bits"),
    (linear("int8", inputs="int8"), "does not support int8 per token activations"),
    (linear("int8", inputs="int8", static=True), "does not support int8 per tensor activations"),
    (linear("int8", 32, rows=8), "integers of 2, 3, 4, 5, 6 or 8 bits"),
    (linear("int4", 16, symmetric=False), "groups of 32, 64 or 128"),
    (linear("int4", 32), "weights.symmetric=false"),
]


@pytest.mark.parametrize(("scheme", "message"), REFUSED, ids=lambda value: getattr(value, "describe", str)())
def test_what_mlx_cannot_hold_is_refused(scheme, message):
    with pytest.raises(SchemeError, match=message):
        FORMAT.check(scheme, (128, 128))


def test_weights_that_a_bias_cannot_describe_are_refused(case):
    scheme, weight, _ = case
    with pytest.raises(SchemeError, match="a scale is 0"):
        FORMAT.encode(replace(weight, scale=weight.scale * 0), scheme)
    with pytest.raises(SchemeError, match="scales of 16 bits"):
        FORMAT.encode(replace(weight, scale=weight.scale.float()), scheme)
    with pytest.raises(SchemeError, match="activation order"):
        FORMAT.encode(replace(weight, group_index=torch.arange(256).flip(0) // scheme.weight.group_size), scheme)


def test_config_gives_each_linear_its_scheme():
    four, eight = linear("int4", 64, symmetric=False), linear("int8", 32, symmetric=False)
    linears = {"layers.0.a": four, "layers.1.a": four, "layers.1.b": eight}
    config = FORMAT.config(linears, ("lm_head",))
    assert config["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "layers.1.b": {"group_size": 32, "bits": 8},
        "lm_head": False,
    }
    assert config["quantization_config"] == config["quantization"]
    FORMAT.check_config(config, linears, ("lm_head",))
    assert FORMAT.recognise({"quantization_config": config["quantization_config"]}) is None
    with pytest.raises(SchemeError, match="mode 'mxfp4' is not supported"):
        FORMAT.recognise({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}})
    with pytest.raises(CheckpointError, match="quantization 4 bits in groups of 100"):
        FORMAT.recognise({"quantization": {"bits": 4, "group_size": 100}})
