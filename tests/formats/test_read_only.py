"""Formats of other tools: bitsandbytes, torchao, ModelOpt, fine-grained FP8, and the FP4 and FP8 blocks of CT."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import REGISTRY, recognise
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.dtype import FP8, INT8, MXFP4, NVFP4
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from tests.formats.schemes import linear

CT = REGISTRY.load("compressed-tensors")
FOUR_16 = LinearScheme(weight=WeightScheme(dtype=NVFP4, group_size=16))
FOUR_32 = LinearScheme(weight=WeightScheme(dtype=MXFP4, group_size=32))
BLOCKS = LinearScheme(
    weight=WeightScheme(dtype=FP8, group_size=128, block_rows=128),
    activation=ActivationScheme(dtype=FP8, group_size=128),
)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def config(**section):
    return {"quantization_config": section}


def scheme_of(section):
    format_, scheme = recognise(section, "config.json")
    return format_.name, format_, scheme.find("model.layers.0.mlp.up_proj")


# bitsandbytes

TABLE = torch.linspace(-1, 1, 16)


def nf4_tensors(codes, absmax, **state):
    flat = codes.view(-1, 2)
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(codes.shape), **state})
    return {
        "weight": (flat[:, 0] << 4 | flat[:, 1]).to(torch.uint8).view(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": TABLE,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text.encode()), dtype=torch.uint8),
    }


@pytest.mark.parametrize("shape", [(4, 128), (4, 96), (2, 32)])
def test_nf4_is_a_table_times_the_scale_of_a_flat_block(shape):
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(0))
    absmax = torch.rand(shape[0] * shape[1] // 64) + 0.5
    name, format_, scheme = scheme_of(config(quant_method="bitsandbytes", load_in_4bit=True))
    decoded = format_.decode(nf4_tensors(codes, absmax), scheme)
    assert name == "bitsandbytes"
    expected = TABLE[codes].view(-1, 64) * absmax.view(-1, 1)
    assert torch.equal(decoded.dequantize(), expected.view(shape))


def test_nested_scales():
    codes, index = torch.full((8, 64), 15), torch.arange(8).to(torch.uint8)
    table, outer = torch.linspace(0, 1, 256), torch.tensor([2.0, 3.0])
    tensors = nf4_tensors(codes, index, nested_blocksize=4, nested_offset=0.25)
    tensors |= {"weight.nested_quant_map": table, "weight.nested_absmax": outer}
    decoded = REGISTRY.load("bitsandbytes").decode(tensors, linear("int4"))
    expected = table[:8] * outer.repeat_interleave(4) + 0.25
    assert torch.equal(decoded.dequantize()[:, 0], expected)


def test_llm_int8():
    _, format_, scheme = scheme_of(config(quant_method="bitsandbytes", load_in_8bit=True))
    codes = torch.randint(-127, 128, (4, 8)).to(torch.int8)
    decoded = format_.decode({"weight": codes, "SCB": torch.tensor([127.0, 254, 1, 2])}, scheme)
    assert torch.equal(decoded.dequantize()[:2], codes[:2].float() * torch.tensor([[1.0], [2.0]]))


# torchao


def torchao(kind, **data):
    return config(quant_method="torchao", quant_type={"default": {"_type": kind, "_data": data}})


PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
PER_GROUP = {"_type": "PerGroup", "_data": {"group_size": 32}}
INTX = {
    "granularity": PER_GROUP,
    "weight_dtype": {"_data": "int4"},
    "intx_packing_format": {"_data": "UNPACKED_TO_INT8"},
}
KINDS = [
    (torchao("Int8WeightOnlyConfig", granularity=PER_ROW), linear("int8")),
    (torchao("Int8DynamicActivationInt8WeightConfig", granularity=PER_ROW), linear("int8", inputs="int8")),
    (torchao("Float8WeightOnlyConfig", granularity=PER_ROW), linear("fp8")),
    (torchao("IntxWeightOnlyConfig", **INTX, mapping_type={"_data": "SYMMETRIC"}), linear("int4", 32)),
    (
        torchao("IntxWeightOnlyConfig", **INTX, mapping_type={"_data": "ASYMMETRIC"}),
        linear("int4", 32, symmetric=False),
    ),
]


@pytest.mark.parametrize(("section", "expected"), KINDS)
def test_torchao(section, expected):
    name, format_, scheme = scheme_of(section)
    assert (name, scheme) == ("torchao", expected)
    groups = scheme.weight.num_groups(64)
    codes = torch.randint(-8, 8, (4, 64)).to(scheme.weight.dtype.storage)
    zero = torch.zeros(4, groups) if scheme.weight.symmetric else torch.randint(-8, 8, (4, groups))
    scale = torch.rand(4, groups) + 0.1
    tensors = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero.to(torch.int8)}
    decoded = format_.decode(tensors, scheme).dequantize()
    spread = [tensor.repeat_interleave(64 // groups, 1) for tensor in (zero.float(), scale)]
    assert torch.equal(decoded, (codes.float() - spread[0]) * spread[1])


# ModelOpt and fine-grained FP8


def test_modelopt_fp8():
    _, format_, scheme = scheme_of(config(quant_method="modelopt", quantization={"quant_algo": "FP8"}))
    codes = noise(4, 8).to(torch.float8_e4m3fn)
    decoded = format_.decode(
        {"weight": codes, "weight_scale": torch.tensor(0.5), "input_scale": torch.ones(())}, scheme
    )
    assert torch.equal(decoded.dequantize(), codes.float() / 2)


def test_modelopt_int4_packs_two_outputs():
    section = config(quant_method="modelopt", quantization={"quant_algo": "INT4_AWQ", "group_size": 4})
    _, format_, scheme = scheme_of(section)
    codes = torch.randint(-8, 8, (4, 8), generator=torch.Generator().manual_seed(0))
    packed = codes[0::2] & 15 | (codes[1::2] & 15) << 4
    tensors = {"weight": packed.to(torch.uint8), "weight_scale": torch.ones(4, 2)}
    assert torch.equal(format_.decode(tensors, scheme).codes.long(), codes)
    with pytest.raises(SchemeError, match="pre_quant_scale"):
        format_.decode({**tensors, "pre_quant_scale": torch.ones(8)}, scheme)


def test_modelopt_of_several_kinds_says_of_each_linear_what_it_is():
    layers = {"a.up": {"quant_algo": "NVFP4", "group_size": 16}, "a.down": {"quant_algo": "FP8"}}
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    for entries in (section, {"quantization": section}):
        _, scheme = recognise(config(quant_method="modelopt", **entries), "config.json")
        kinds = {name: scheme.find(name) for name in ("a.up", "a.down", "a.gate")}
        assert {name: kind and kind.describe() for name, kind in kinds.items()} == {
            "a.up": "nvfp4 g16",
            "a.down": "fp8 channel",
            "a.gate": None,
        }


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    from quantkit.checkpoints.folder import read_config_file

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert scheme_of(read_config_file(tmp_path))[0] == "modelopt"


@pytest.mark.parametrize("shape", [(256, 128), (200, 256), (64, 192)])
def test_fine_grained_fp8(shape):
    name, format_, scheme = scheme_of(config(quant_method="fp8", weight_block_size=[128, 128]))
    assert (name, scheme) == ("fp8", BLOCKS)
    codes = noise(*shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    decoded = format_.decode({"weight": codes, "weight_scale_inv": scale}, scheme)
    full = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(decoded.dequantize(), codes.float() * full)
    written = CT.encode(decoded, scheme)
    assert torch.equal(written["weight_scale"], scale)
    assert torch.equal(CT.decode(written, scheme).dequantize(), decoded.dequantize())


def test_fp8_of_one_scale_with_fixed_inputs():
    _, format_, scheme = scheme_of(config(quant_method="fp8", weight_block_size=None, activation_scheme="static"))
    codes = noise(8, 32).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale_inv": torch.tensor(0.25), "activation_scale": torch.tensor(0.5)}
    decoded = format_.decode(tensors, scheme)
    assert torch.equal(decoded.dequantize(), codes.float() * 0.25)
    assert (scheme.activation.granularity, decoded.input_scale.tolist()) == ("tensor", [0.5])
    with pytest.raises(CheckpointError, match="'activation_scale'"):
        format_.decode({name: tensors[name] for name in ("weight", "weight_scale_inv")}, scheme)


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e8m0fnu])
def test_fp8_scales_may_be_powers_of_two(stored):
    _, format_, scheme = scheme_of(config(quant_method="fp8", weight_block_size=[1, 32], scale_fmt="ue8m0"))
    codes, bytes_ = noise(4, 64).to(torch.float8_e4m3fn), torch.tensor([[127, 128]] * 4, dtype=torch.uint8)
    decoded = format_.decode({"weight": codes, "weight_scale_inv": bytes_.view(stored)}, scheme)
    assert torch.equal(decoded.dequantize(), codes.float() * torch.tensor([1.0, 2.0]).repeat_interleave(32))


def test_fp4_experts_beside_fp8_blocks():
    """DeepSeek-V4: two codes in an int8, a power of two per 32 inputs, under names of their own."""
    _, format_, scheme = scheme_of(config(quant_method="fp8", weight_block_size=[128, 128]))
    packed = torch.randint(-128, 128, (4, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = torch.full((4, 4), 126, dtype=torch.uint8)
    decoded = format_.decode({"weight": packed, "weight_scale_inv": scale.view(torch.float8_e8m0fnu)}, scheme)
    reference = Fp8Dequantize(None)._dequantize_one(packed, scale, output_dtype=torch.float32)
    assert torch.equal(decoded.dequantize(), reference)
    assert format_.shape({"weight": (4, 64), "weight_scale_inv": (4, 4)}, scheme) == (4, 128)
    stored = format_.stored_weights(["a.w1.weight", "a.w1.scale", "a.up", "a.up_scale_inv", "norm.weight"])
    assert stored == {
        "a.w1.weight": {"weight": "a.w1.weight", "weight_scale_inv": "a.w1.scale"},
        "a.up": {"weight": "a.up", "weight_scale_inv": "a.up_scale_inv"},
    }


def test_inputs_in_groups_are_quantized_group_by_group():
    values = noise(3, 256) * torch.tensor([1.0, 100.0]).repeat_interleave(128)
    decoded = fake_quantize_inputs(values, ActivationScheme(dtype=INT8, group_size=128))
    whole = ActivationScheme(dtype=INT8)
    assert torch.equal(decoded[:, :128], fake_quantize_inputs(values[:, :128], whole))
    assert torch.equal(decoded[:, 128:], fake_quantize_inputs(values[:, 128:], whole))


# FP4


@pytest.mark.parametrize(("preset", "scheme"), [("NVFP4A16", FOUR_16), ("MXFP4A16", FOUR_32)])
def test_fp4_packs_are_the_library_s(preset, scheme):
    section = {"quant_method": "compressed-tensors", "config_groups": {preset: ["Linear"]}, "format": None}
    section["format"] = "nvfp4-pack-quantized" if scheme is FOUR_16 else "mxfp4-pack-quantized"
    section |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
    assert scheme_of({"quantization_config": section})[2] == scheme
    written = CT.config({"a": scheme}, ["lm_head"])
    assert CT.recognise(written).find("a") == scheme
    group = written["quantization_config"]["config_groups"]["group_0"]
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    weight = noise(8, 64)
    scale = 2.0 ** weight.view(8, -1, scheme.weight.group_size).abs().amax(-1).log2().floor() / 4
    state = {"weight": weight, "weight_scale": scale}
    if scheme is FOUR_16:
        outer = torch.tensor([100.0])
        state |= {"weight_scale": (scale * 100).to(torch.float8_e4m3fn).float(), "weight_global_scale": outer}
    stored = compressor.compress(dict(state), QuantizationScheme(**group))
    tensors = {
        name: stored[name] for name in ("weight_packed", "weight_scale", "weight_global_scale") if name in stored
    }
    decoded = CT.decode(tensors, scheme)
    expected = compressor.decompress(dict(stored), QuantizationScheme(**group))["weight"]
    assert torch.equal(decoded.dequantize(expected.dtype), expected)  # the library answers in bfloat16
    again = CT.encode(decoded, scheme)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    assert CT.shape({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme) == (8, 64)


# Refusals


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao", "modelopt", "fp8"])
def test_they_are_not_written(name):
    format_, scheme = REGISTRY.load(name), linear("int8")
    for attempt in (
        lambda: format_.check(scheme, (8, 8)),
        lambda: format_.config({}, []),
        lambda: format_.encode(None, scheme),
    ):
        with pytest.raises(SchemeError, match="but not write them"):
            attempt()


BAD = [
    config(quant_method="bitsandbytes"),
    config(quant_method="torchao", quant_type="int8"),
    torchao("Int4WeightOnlyConfig", granularity=PER_GROUP),
    torchao("Int8WeightOnlyConfig", granularity={"_type": "PerTensor"}),
    config(quant_method="modelopt", quant_algo="W4A8_AWQ"),
    config(quant_method="modelopt", quant_algo="MIXED_PRECISION"),
    config(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": "FP8"}),
    config(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "MXFP8"}}),
    config(quant_method="fp8", weight_block_size=[128]),
    config(quant_method="fp8", activation_scheme="none"),
]


@pytest.mark.parametrize("section", BAD)
def test_kinds_that_cannot_be_decoded(section):
    with pytest.raises(SchemeError) as error:
        recognise(section, "config.json")
    assert "\n" not in str(error.value)


def test_a_damaged_state_is_refused():
    tensors = nf4_tensors(torch.zeros(2, 64, dtype=torch.int64), torch.ones(2))
    for name, value in [
        ("weight", tensors["weight"][1:]),
        ("weight.absmax", torch.ones(3)),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([1, 2], dtype=torch.uint8)),
    ]:
        with pytest.raises(CheckpointError):
            REGISTRY.load("bitsandbytes").decode({**tensors, name: value}, linear("int4"))
