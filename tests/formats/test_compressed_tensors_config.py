"""config.json of the compressed-tensors format: what we write, and what we make of what others wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import compressed_tensors
import pytest
from compressed_tensors.quantization import QuantizationConfig, is_preset_scheme, preset_name_to_scheme

from quantkit.errors import SchemeError
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.scheme import Rule
from tests.formats.schemes import SCHEMES, linear

SYMMETRIC = [name for name, scheme in SCHEMES.items() if scheme.weight.symmetric]


def test_config_of_one_scheme():
    config = FORMAT.config({"model.a": SCHEMES["int4-g32-asym"], "model.b": SCHEMES["int4-g32-asym"]}, ["lm_head"])
    section = config["quantization_config"]
    assert list(config) == ["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    assert section["format"] == "pack-quantized"
    assert section["quantization_status"] == "compressed"
    assert section["version"] == compressed_tensors.__version__
    assert section["ignore"] == ["lm_head"]
    (group,) = section["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["format"] == "pack-quantized"
    weights = group["weights"]
    assert (weights["num_bits"], weights["type"], weights["symmetric"]) == (4, "int", False)
    assert (weights["strategy"], weights["group_size"]) == ("group", 32)
    json.dumps(config)


def test_groups_of_several_schemes_do_not_overlap():
    linears = {"a": SCHEMES["int4-g32"], "b": SCHEMES["w8a8"], "c": SCHEMES["int4-g32"], "d": SCHEMES["fp8"]}
    section = FORMAT.config(linears, ["lm_head"])["quantization_config"]
    groups = section["config_groups"].values()
    assert [group["targets"] for group in groups] == [["a", "c"], ["b"], ["d"]]
    assert [group["format"] for group in groups] == ["pack-quantized", "int-quantized", "float-quantized"]
    assert section["format"] == "mixed-precision"
    same = FORMAT.config({"a": SCHEMES["int4-g32"], "b": SCHEMES["int8-channel"]}, [])["quantization_config"]
    assert same["format"] == "pack-quantized"


def test_nothing_quantized_is_an_ordinary_config():
    assert FORMAT.config({}, ["lm_head"]) == {}


@pytest.mark.parametrize(
    "names", [["int4-g32"], ["w8a8"], ["fp8-dynamic", "int8-channel", "int2-g16"], SYMMETRIC, ["int4-g32-asym"]]
)
def test_recognise_inverts_config(names):
    linears = {f"model.layers.{i}.mlp.up_proj": SCHEMES[name] for i, name in enumerate(names * 2)}
    config = json.loads(json.dumps(FORMAT.config(linears, ["lm_head", "model.layers.99.mlp.up_proj"])))
    scheme = FORMAT.recognise(config)
    assert scheme is not None
    for name, expected in linears.items():
        assert scheme.find(name) == expected
    assert scheme.find("lm_head") is None
    assert scheme.find("model.layers.99.mlp.up_proj") is None


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}])
def test_other_configs_are_not_recognised(config):
    assert FORMAT.recognise(config) is None


FP8_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
ASYMMETRIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}
PRESETS = {
    "FP8": ("float-quantized", linear("fp8", inputs="fp8", rows=None, static=True)),
    "FP8_BLOCK": ("float-quantized", linear("fp8", 128, inputs="fp8", rows=128, input_group=128)),
    "NVFP4": ("nvfp4-pack-quantized", linear("nvfp4", inputs="nvfp4")),
    "NVFP4A16": ("nvfp4-pack-quantized", linear("nvfp4")),
    "MXFP4": ("mxfp4-pack-quantized", linear("mxfp4", inputs="mxfp4")),
    "MXFP8": ("mxfp8-quantized", linear("mxfp8", inputs="mxfp8")),
    "W4A8": ("int-quantized", linear("int4", 128, inputs="int8")),
    "W4AFP8": ("pack-quantized", linear("int4", 128, inputs="fp8")),
    "W5A16": ("pack-quantized", linear("int5", 128)),
}


def section(groups: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    basis = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {"quantization_config": {**basis, "config_groups": groups, **fields}}


def test_recognise_presets_by_name():
    scheme = FORMAT.recognise(section({"W4A16": ["Linear"]}, ignore=["lm_head"]))
    assert scheme is not None
    assert scheme.default == linear("int4", 128)
    scheme = FORMAT.recognise(section({"FP8_DYNAMIC": ["Linear"]}, format="float-quantized"))
    assert scheme is not None
    assert scheme.default == linear("fp8", inputs="fp8")


@pytest.mark.parametrize("name", [name for name in PRESETS if is_preset_scheme(name)])
def test_schemes_are_those_of_the_presets(name):
    """Presets read as our schemes, and what we write for a scheme says what the preset says."""
    layout, expected = PRESETS[name]
    scheme = FORMAT.recognise(section({name: ["Linear"]}, format=layout))
    assert scheme is not None
    assert scheme.default == expected
    written = FORMAT.config({"a": expected}, [])["quantization_config"]["config_groups"]["group_0"]
    preset = preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")
    assert written["format"] == layout
    for part in ("weights", "input_activations"):
        fields = {key: value for key, value in (preset[part] or {}).items() if key not in ("observer", "zp_dtype")}
        assert {key: value for key, value in (written[part] or {}).items() if key in fields} == fields


def test_recognise_channel_written_as_minus_one():
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": -1}
    scheme = FORMAT.recognise(section({"g": {"targets": ["Linear"], "weights": weights}}))
    assert scheme is not None
    assert scheme.default == linear("int8")


def test_recognise_targets_as_the_library_matches_them():
    """Names win over expressions over the class; expressions match from the start of a name."""
    groups = {
        "class": {"targets": ["Linear"], "weights": W4},
        "expression": {"targets": ["re:model.*down"], "weights": {**W4, "num_bits": 8}},
        "name": {"targets": ["model.0.down_proj"], "weights": {**W4, "num_bits": 2}},
    }
    scheme = FORMAT.recognise(section(groups, ignore=["lm_head", "re:.*visual"]))
    assert scheme is not None
    expected = {
        "model.0.up_proj": linear("int4", 128),
        "model.1.down_proj": linear("int8", 128),
        "model.0.down_proj": linear("int2", 128),
        "lm_head": None,
        "model.visual.down_proj": None,
        "xmodel.1.down_proj": linear("int4", 128),
    }
    assert {name: scheme.find(name) for name in expected} == expected


def test_recognise_without_a_class_leaves_the_rest_alone():
    scheme = FORMAT.recognise(section({"g": {"targets": ["re:.*up_proj$", "a[0]"], "weights": W4}}))
    assert scheme is not None
    assert scheme.rules[0] == Rule(pattern="*", linear=None)
    assert scheme.find("x.up_proj") == scheme.find("a[0]") == linear("int4", 128)
    assert scheme.find("x.down_proj") is None


@pytest.mark.parametrize(
    "config, part",
    [
        (
            section({"g": {"targets": ["Linear"], "weights": W8, "input_activations": FP8_TOKEN}}),
            "fp8 per token activa",
        ),
        (section({"g": {"targets": ["Linear"], "weights": {**W4, "num_bits": 7}}}), "7-bit int is not supported"),
        (section({"g": {"targets": ["Linear"], "weights": W8, "input_activations": ASYMMETRIC}}), "symmetric=False"),
        (section({"g": {"targets": ["Linear"], "weights": {**W4, "actorder": "group"}}}), "actorder"),
        (section({"g": {"targets": ["Linear"], "weights": {**W4, "colour": 1}}}), "colour"),
        (section({"g": {"targets": ["Linear"]}}), "no weights"),
        (section({"g": {"targets": ["Embedding"], "weights": W4}}), "class 'Embedding'"),
        (section({"g": {"targets": ["re:("], "weights": W4}}), "not a valid regular expression"),
        (section({"NO_SUCH_PRESET": ["Linear"]}), "NO_SUCH_PRESET"),
        (section({}), "no config_groups"),
        (section({"W4A16": ["Linear"]}, quantization_status="frozen"), "'frozen'"),
        (section({"W4A16": ["Linear"]}, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (section({"W4A16": ["Linear"]}, transform_config={"config_groups": {"u": {}}}), "transform_config"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
    ],
)
def test_what_cannot_be_decoded_is_refused(config, part):
    with pytest.raises(SchemeError) as error:
        FORMAT.recognise(config)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_the_config_is_valid_to_the_library():
    config = FORMAT.config({name: SCHEMES[name] for name in SYMMETRIC}, ["lm_head"])["quantization_config"]
    assert QuantizationConfig.model_validate(config).format == "mixed-precision"


def test_asymmetric_weights_are_decoded_while_loading():
    """transformers cannot set up packed zero points without data; see `make_config`."""
    one = FORMAT.config({"a": SCHEMES["int4-g32-asym"]}, [])["quantization_config"]
    assert one["dequantize"] is True
    # With several schemes transformers would decode all modules by the first one.
    mixed = {"a": SCHEMES["int4-g32"], "b": SCHEMES["int8-channel"]}
    for linears in ({"a": SCHEMES["int4-g32"]}, mixed):
        assert "dequantize" not in FORMAT.config(linears, [])["quantization_config"]
