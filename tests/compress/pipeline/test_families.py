"""Every family goes through the pipeline: what it writes loads in transformers and computes what was decoded."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import SchemeError
from quantkit.formats import recognise
from quantkit.formats.base import by_module
from quantkit.models.families import find
from quantkit.numerics.activation_quant import fake_quantize_inputs
from tests.compress.pipeline.test_quantize import IDS, run
from tests.helpers import EVERY_FAMILY, EXPERT_FAMILIES, make_model, one_of_each, transformers_logits

# AWQ folds scales into the norms of a family, so it has every other one; GPTQ has all in runtime/test_greedy_text.
RECIPES = ("awq-int4", "gptq-int4", "awq-int4", "rtn-int8", "awq-int4", "fp8-dynamic")
WITH_EXPERTS = EXPERT_FAMILIES
# What transformers itself cannot load as codes: no reader of compressed-tensors there knows a Conv1D, or experts that
# are stored as one.
NOT_LOADED = ("gpt2", "gpt_oss", "granitemoe", "granitemoeshared")
DECODED_AT_LOAD = ("falcon", "gpt_bigcode")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that gives a family's model; each is made once."""
    made = {}

    def get(family, dtype=torch.float32):
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            made[family, dtype] = make_model(folder, family, dtype=dtype, num_hidden_layers=2)
        return made[family, dtype]

    return get


def decoded_copy(source, output, folder):
    """The source as a plain checkpoint with every quantized weight as we decode it from the output."""
    config = json.loads((source / "config.json").read_text())
    format_, scheme = recognise(json.loads((output / "config.json").read_text()), "")
    reader, tensors = CheckpointReader(output), {}
    for module, local in by_module(reader.names).items():
        stored = {name: reader.tensor(f"{module}.{name}" if module else name) for name in local}
        linear = scheme.find(module)
        if linear is not None and {"weight_scale", "scales"} & set(local):
            bias = {"bias": stored.pop("bias")} if "bias" in stored else {}
            decoded = format_.decode(stored, linear)
            stored = {"weight": decoded.dequantize(decoded.scale.dtype).float(), **bias}
        tensors |= {f"{module}.{name}" if module else name: value for name, value in stored.items()}
    folder.mkdir()
    restored = ModelReader(source, find(config)).restore(tensors)
    save_file(
        {name: value.contiguous() for name, value in restored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    shutil.copy(source / "config.json", folder)
    return folder, scheme


def as_compressed_tensors(inputs, scheme):
    """Inputs as that library rounds them: it takes all but the first two of three dimensions for one token."""
    rows = inputs.reshape(1, -1) if inputs.dim() == 2 else inputs.flatten(2)
    return fake_quantize_inputs(rows, scheme).view_as(inputs)


def expected_logits(folder, scheme, quantize_inputs):
    """Logits of the decoded copy; linears that transformers keeps as codes quantize their inputs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in model.named_modules() if quantize_inputs else ():
        linear = scheme.find(name) if isinstance(module, torch.nn.Linear) else None
        if linear is not None and linear.activation is not None:
            module.register_forward_pre_hook(
                lambda module, args, scheme=linear.activation: (as_compressed_tensors(args[0], scheme), *args[1:])
            )
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(("family", "recipe"), one_of_each([n for n in EVERY_FAMILY if n not in NOT_LOADED], RECIPES))
def test_every_family_comes_back_through_transformers(models, tmp_path, text_file, family, recipe):
    changes = {"weights.symmetric": True} if recipe == "awq-int4" and family in WITH_EXPERTS else {}
    model = models(family)
    result = run(model, recipe, tmp_path / "out", text_file, overrides=changes)
    assert all(layer.linears for layer in result.layers)
    actual = transformers_logits(tmp_path / "out", IDS)
    folder, scheme = decoded_copy(model, tmp_path / "out", tmp_path / "decoded")
    expected = expected_logits(folder, scheme, quantize_inputs=family not in DECODED_AT_LOAD)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    original = transformers_logits(model, IDS)
    # Of random weights; recurrent layers with experts lose most (0.74).
    assert 0 < (actual - original).norm() / original.norm() < 0.8


@pytest.mark.parametrize(("family", "recipe"), one_of_each(NOT_LOADED, ("gptq-int4", "awq-int4", "rtn-int8")))
def test_what_transformers_cannot_load_as_codes_comes_back_dense(models, tmp_path, text_file, family, recipe):
    # In the format gptq scales have 16 bits; in a model of 16 bits they have those everywhere.
    model = models(family, torch.float16 if family == "gpt2" else torch.float32)
    symmetric = {"weights.symmetric": True}
    run(model, recipe, tmp_path / "out", text_file, overrides={**symmetric, "format": "dense"})
    codes = {"format": "gptq"} if family == "gpt2" else {}
    result = run(model, recipe, tmp_path / "codes", text_file, overrides={**symmetric, **codes})
    assert any("does not load compressed experts" in text for text in result.warnings) == (family != "gpt2")
    folder, scheme = decoded_copy(model, tmp_path / "codes", tmp_path / "decoded")
    torch.testing.assert_close(
        transformers_logits(tmp_path / "out", IDS),
        expected_logits(folder, scheme, False),
        rtol=0,
        atol=1e-4,
    )


def test_transposed_linears_with_zero_points(models, tmp_path):
    overrides = {"weights.symmetric": False, "weights.group_size": 32, "format": "gptq-v2"}
    run(models("gpt2", torch.float16), "rtn-int4", tmp_path / "out", overrides=overrides)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (section["checkpoint_format"], section["sym"]) == ("gptq_v2", False)


def test_transposed_linears_are_refused_where_no_reader_finds_them(models, tmp_path):
    with pytest.raises(SchemeError, match="Conv1D, which compressed-tensors loaders do not support; set format to one"):
        run(models("gpt2"), "rtn-int8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("granite", "phi3", "olmo2", "qwen2_moe")]


@pytest.mark.parametrize("family", ["starcoder2", "deepseek_v3", *SLOW])
def test_smoothing_changes_no_output_of_a_family(models, tmp_path, text_file, family):
    """AWQ folds scales into norms and linears; at eight bits that adds nothing to the error of plain rounding."""
    model = models(family)
    expected, wrong = transformers_logits(model, IDS), {}
    for recipe in ("awq-int4", "rtn-int4"):
        run(model, recipe, tmp_path / recipe, text_file, overrides={"weights.dtype": "int8", "weights.symmetric": True})
        wrong[recipe] = (transformers_logits(tmp_path / recipe, IDS) - expected).norm() / expected.norm()
    assert wrong["awq-int4"] < 1.2 * wrong["rtn-int4"]
