"""Conversion to MLX: the values of every tensor, entries of config.json that mlx-lm reads, refusals."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from quantkit.api import quantize
from quantkit.compress.convert import convert
from quantkit.compress.convert.source import open_source
from quantkit.errors import SchemeError
from quantkit.inspection import inspect
from tests.formats.test_mlx import plain_values
from tests.helpers import edit_config, load_tensors, make_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
RECIPES = {
    "sym": ("rtn-int4", {"weights.group_size": 64}),
    "asym": ("rtn-int4", {"weights.group_size": 32, "weights.symmetric": False, "weights.dtype": "int3"}),
    "channel": ("rtn-int8", {}),
    "wide": ("rtn-int4", {"weights.dtype": "int6", "weights.group_size": 128}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m", "qwen2", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    for name, (recipe, overrides) in RECIPES.items():
        quantize(model, recipe, folder / name, overrides=overrides)
        convert(folder / name, "mlx", folder / f"{name}-mlx")
    return folder


def own_scheme(folder, module):
    entries = json.loads((folder / "config.json").read_text())["quantization"]
    return {**entries, **entries.get(module, {})}


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_equals_that_of_the_source(made, name):
    source, stored = open_source(made / name), load_tensors(made / f"{name}-mlx")
    assert len(source.linears) == 7
    for module in source.linears:
        own = own_scheme(made / f"{name}-mlx", module)
        parts = {local: stored[f"{module}.{local}"] for local in ("weight", "scales", "biases")}
        expected = source.weight(module).dequantize(torch.float32).numpy()
        assert np.array_equal(plain_values(parts, own["bits"], own["group_size"]), expected), module
    others = [tensor for tensor in load_tensors(made / name) if "proj.weight" not in tensor]
    assert others
    assert all(torch.equal(load_tensors(made / name)[tensor], stored[tensor]) for tensor in others)


@pytest.mark.parametrize("name", RECIPES)
def test_mlx_gives_the_values_of_the_source(made, name):
    mx = pytest.importorskip("mlx.core")
    source, stored = open_source(made / name), load_tensors(made / f"{name}-mlx")
    for module in source.linears:
        own = own_scheme(made / f"{name}-mlx", module)
        parts = [mx.array(stored[f"{module}.{local}"].numpy()) for local in ("weight", "scales", "biases")]
        values = mx.dequantize(*parts, group_size=own["group_size"], bits=own["bits"])
        assert np.array_equal(np.array(values), source.weight(module).dequantize(torch.float32).numpy()), module


def test_groups_that_mlx_lacks_are_divided(made):
    sizes = {
        module: own_scheme(made / "channel-mlx", module)["group_size"]
        for module in open_source(made / "channel").linears
    }
    assert {name.rpartition(".")[2]: size for name, size in sizes.items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 128),
        "down_proj": 64,  # 192 inputs
    }


def test_config_has_what_mlx_lm_reads(made):
    config = json.loads((made / "sym-mlx" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": False}
    assert config["quantization_config"] == config["quantization"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert "rope_scaling" not in config
    assert inspect(made / "sym-mlx").format == "mlx"


def test_codes_come_back_from_mlx(made, tmp_path):
    convert(made / "asym-mlx", "compressed-tensors", tmp_path / "back")
    assert "quantization" not in json.loads((tmp_path / "back" / "config.json").read_text())
    first, second = open_source(made / "asym"), open_source(tmp_path / "back")
    for module in first.linears:
        weight, again = first.weight(module), second.weight(module)
        assert torch.equal(weight.codes, again.codes)
        assert torch.equal(weight.zero_point, again.zero_point)
        assert torch.equal(weight.scale.float(), again.scale.float())
    convert(made / "asym-mlx", "dense", tmp_path / "dense")
    convert(made / "asym", "dense", tmp_path / "expected")
    left, right = load_tensors(tmp_path / "dense"), load_tensors(tmp_path / "expected")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, r"does not write model_type 'gemma2' for mlx-lm.*supported: cohere, "),
        ({"sliding_window": 32, "use_sliding_window": True}, "mlx-lm ignores sliding_window 32 of model_type 'qwen2'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "does not write rope_type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "does not write rope_type 'longrope'"),
    ],
)
def test_models_that_were_not_compared_are_refused(made, tmp_path, changes, message):
    shutil.copytree(made / "sym", tmp_path / "changed")
    edit_config(tmp_path / "changed", **changes)
    with pytest.raises(SchemeError, match=message):
        convert(tmp_path / "changed", "mlx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


ORDERED = {"weights.group_size": 32, "format": "gptq", "steps.gptq.act_order": "group"}
CANNOT = [
    ("w8a8-int8", {"steps": [], "calibration": None}, "mlx format does not support int8 per token activations"),
    ("fp8-dynamic", {}, "mlx stores integers|mlx format does not support"),
    ("rtn-int4", {"weights.group_size": 16}, "groups of 32, 64 or 128 inputs, and int4 g16"),
    ("gptq-int4", ORDERED, "activation order, which mlx cannot store"),
    ("mxfp4", {}, "mlx stores integers"),
]


@pytest.mark.parametrize(("recipe", "overrides", "message"), CANNOT, ids=[case[0] for case in CANNOT])
def test_what_mlx_cannot_hold_is_refused_before_anything_is_written(model, tmp_path, recipe, overrides, message):
    samples = {"calibration.samples": 2, "calibration.sequence_length": 32} if recipe == "gptq-int4" else {}
    quantize(model, recipe, tmp_path / "q", overrides={**overrides, **samples})
    with pytest.raises(SchemeError, match=message):
        convert(tmp_path / "q", "mlx", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_scales_of_32_bits_are_refused(tmp_path):
    model = make_model(tmp_path / "m", "qwen2", **SIZES)
    quantize(model, "rtn-int4", tmp_path / "q", overrides={"weights.group_size": 32})
    with pytest.raises(SchemeError, match="scales are float32 and would be rounded to float16 or bfloat16"):
        convert(tmp_path / "q", "mlx", tmp_path / "out")


def test_quantize_names_the_command_that_writes_mlx(model, tmp_path):
    with pytest.raises(SchemeError, match="run `quantkit convert --to mlx`"):
        quantize(
            model,
            "rtn-int4",
            tmp_path / "q",
            overrides={"format": "mlx", "weights.symmetric": False, "weights.group_size": 32},
        )
