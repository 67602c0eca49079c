"""Codes that stay the source's: the same numbers in the result, or a reason before any work."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import QuantkitError
from quantkit.models.families import find
from quantkit.planning.estimate import estimate
from tests.compress.pipeline.test_quantize import IDS, decoded_logits
from tests.helpers import load_tensors, one_of_each, transformers_logits
from tests.quantized_sources import bits

KEEP = """
name: mine
weights: {{dtype: int4, group_size: 32}}
overrides:
  - modules: ["{pattern}"]
    keep: source
steps: [{steps}]
{calibration}
format: {format}
"""
CALIBRATION = "calibration: {samples: 4, sequence_length: 16}"


def keep_recipe(folder, pattern, steps="gptq", format_="compressed-tensors"):
    path = folder / "mine.yaml"
    calibration = CALIBRATION if steps and steps != "rotate" else ""
    path.write_text(KEEP.format(pattern=pattern, steps=steps, calibration=calibration, format=format_))
    return path


KEPT = [
    ("fp8 blocks", "*.shared_experts.*", "fp8 128x128"),
    ("fp8 blocks of compressed-tensors", "*self_attn*", "fp8 128x128"),
    ("fp8 channels", "*self_attn*", "fp8 channel"),
    ("fp8 tensors", "*mlp*", "fp8 tensor"),
    ("int4 experts", "*.experts.*", "int4 g128"),
    ("mxfp4 stacks", "*experts*", "mxfp4 g32"),
    ("nvfp4", "*.experts.*", "nvfp4 g16"),
    ("mxfp8", "*self_attn*", "mxfp8 g32"),
]


@pytest.mark.parametrize(("kept", "steps"), one_of_each(KEPT, ["awq, gptq", "", ""]), ids=str)
def test_kept_linears_have_the_numbers_of_the_source(quantized_pair, tmp_path, text_file, kept, steps):
    kind, pattern, scheme = kept
    source, _ = quantized_pair(kind)
    overrides = {"calibration.data": str(text_file)} if steps else {}
    result = quantkit.quantize(source, keep_recipe(tmp_path, pattern, steps), tmp_path / "out", overrides=overrides)
    assert any(f"keep the codes of the source ({scheme}" in warning for warning in result.warnings)
    layers = [layer for layer in result.layers if any(one.scheme.startswith(scheme) for one in layer.linears)]
    kept = {f"{layer.name}.{one.name}" for layer in layers for one in layer.linears if one.scheme.startswith(scheme)}
    others = {f"{layer.name}.{one.name}" for layer in result.layers for one in layer.linears} - kept
    assert kept
    assert others
    before, after = model_view(source), model_view(tmp_path / "out")
    for name in kept:
        assert torch.equal(bits(after.tensor(f"{name}.weight")), bits(before.tensor(f"{name}.weight"))), name
        codes, written = before.codes(f"{name}.weight"), after.codes(f"{name}.weight")
        assert torch.equal(bits(codes.codes), bits(written.codes))
        assert torch.equal(codes.scale.float(), written.scale.float())
    for name in others:
        assert not torch.equal(after.tensor(f"{name}.weight"), before.tensor(f"{name}.weight")), name


AS_NVFP4 = """
name: mine
weights: {{dtype: nvfp4}}
ignore: ["*self_attn*"]
overrides:
  - modules: ["{pattern}"]
    keep: source
    weights: {{dtype: {dtype}}}
"""


@pytest.mark.parametrize(("kind", "pattern"), [("mxfp4", "*mlp*"), ("mxfp4 stacks", "*experts*")])
def test_mxfp4_is_kept_as_nvfp4_of_the_same_values(quantized_pair, tmp_path, kind, pattern):
    """But for linears whose scales span more than an 8-bit float does, which are rounded and said to be."""
    source = tmp_path / "source"
    shutil.copytree(quantized_pair(kind)[0], source)
    tensors = load_file(source / "model.safetensors")
    wide = next(name for name in sorted(tensors) if name.endswith(("mlp.up_proj.weight_scale", "down_proj_scales")))
    codes = tensors[wide.replace("_scales", "_blocks").replace("weight_scale", "weight_packed")]
    first, last = (0, 0, 0), (0, 1, 0)
    if tensors[wide].dim() == 2:
        first, last = first[1:], last[1:]
    codes[first], codes[last] = 0x11, 0x11  # not zero
    tensors[wide][first], tensors[wide][last] = 100, 118
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (tmp_path / "mine.yaml").write_text(AS_NVFP4.format(pattern=pattern, dtype="nvfp4"))
    result = quantkit.quantize(source, tmp_path / "mine.yaml", tmp_path / "out")
    assert any("nvfp4 g16; linears whose scales this scheme cannot hold" in warning for warning in result.warnings)
    notes = [note for layer in result.layers for note in layer.notes]
    assert len(notes) == 1
    assert "span too wide a range for nvfp4 g16" in notes[0]
    rounded = {f"{result.layers[0].name}.{name}" for name in notes[0].partition(":")[0].split(", ")}
    before, after = model_view(source), model_view(tmp_path / "out")
    names = {f"{layer.name}.{one.name}" for layer in result.layers for one in layer.linears}
    assert len(names) > len(rounded) > 0
    same = {name: torch.equal(*(view.tensor(f"{name}.weight") for view in (after, before))) for name in names}
    assert all(same[name] for name in names - rounded)
    assert not all(same[name] for name in rounded)  # rounding may happen on what is exact for one of them
    assert {after.stored_scheme(f"{name}.weight").describe() for name in names} == {"nvfp4 g16"}


def test_no_other_codes_become_others(quantized_pair, tmp_path):
    for kind, dtype in (("mxfp4", "int4"), ("fp8 channels", "nvfp4")):
        (tmp_path / "mine.yaml").write_text(AS_NVFP4.format(pattern="*mlp*", dtype=dtype))
        with pytest.raises(QuantkitError, match=r"its codes cannot be kept as \w+ .*only mxfp4 can be kept as nvfp4"):
            quantkit.quantize(quantized_pair(kind)[0], tmp_path / "mine.yaml", tmp_path / "out")


def model_view(folder):
    view = open_dense(folder)
    return ModelReader.of(view, find(view.config))


def test_files_of_kept_blocks_are_those_of_the_source(quantized_pair, tmp_path):
    source, _ = quantized_pair("fp8 blocks")
    quantkit.quantize(source, keep_recipe(tmp_path, "*.shared_experts.*", ""), tmp_path / "out")
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    name = "model.layers.1.mlp.shared_experts.up_proj"
    assert torch.equal(bits(after[f"{name}.weight"]), bits(before[f"{name}.weight"]))
    assert torch.equal(after[f"{name}.weight_scale"], before[f"{name}.weight_scale_inv"])
    groups = CheckpointReader(tmp_path / "out").config["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}


def test_transformers_computes_with_kept_codes(quantized_pair, tmp_path):
    source, twin = quantized_pair("fp8 blocks of compressed-tensors")
    quantkit.quantize(source, keep_recipe(tmp_path, "*self_attn*", ""), tmp_path / "out")
    assert torch.equal(transformers_logits(tmp_path / "out", IDS), decoded_logits(twin, tmp_path / "out"))


NOT_KEPT = [
    ("fp8 blocks", "*.mlp.gate", "", "compressed-tensors", r"matches no linear"),
    ("fp8 blocks", "*.kv_a_proj_with_mqa", "", "compressed-tensors", "use a narrower pattern"),
    ("fp8 channels", "*mlp*", "rotate", "compressed-tensors", r"the step rotate changes all weights"),
    (
        "fp8 channels",
        "*mlp*",
        "",
        "gptq",
        r"the codes of .*mlp.* cannot be kept: the gptq format does not support",
    ),
    ("fp8 channels", "*.q_proj", "", "compressed-tensors", r"fused by inference engines and need one scheme"),
    (
        "fp8 ragged blocks",
        "*.self_attn.*_a_proj*",
        "",
        "compressed-tensors",
        r"of 128 outputs do not divide the 144 outputs",
    ),
    ("nvfp4 of modelopt", "*.experts.*", "", "compressed-tensors", r"cannot be kept.*global scale"),
    ("nf4", "*mlp*", "", "compressed-tensors", r"the codes of .* cannot be kept"),
]


@pytest.mark.parametrize(("kind", "pattern", "steps", "format_", "message"), NOT_KEPT)
def test_what_cannot_be_kept_is_refused_before_work(quantized_pair, tmp_path, kind, pattern, steps, format_, message):
    with pytest.raises(QuantkitError, match=message) as error:
        quantkit.quantize(quantized_pair(kind)[0], keep_recipe(tmp_path, pattern, steps, format_), tmp_path / "out")
    assert error.value.exit_code == 4
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_plan_counts_the_values_and_what_is_kept(quantized_pair, tmp_path):
    source, twin = quantized_pair("fp8 channels")
    plans = [estimate(folder, recipe="rtn-int4", overrides={"weights.group_size": 32}) for folder in (source, twin)]
    sizes = [plan.weights[1].size for plan in plans]
    assert sizes[0] == sizes[1]
    assert plans[0].weights[0].size.memory_bytes < plans[1].weights[0].size.memory_bytes  # as stored
    kept = estimate(source, recipe=keep_recipe(tmp_path, "*self_attn*", ""))
    assert sizes[0].memory_bytes < kept.weights[1].size.memory_bytes < plans[1].weights[0].size.memory_bytes
    with pytest.raises(QuantkitError, match="the source stores this linear unquantized"):
        estimate(twin, recipe=keep_recipe(tmp_path, "*self_attn*", ""))


def test_a_dense_source_has_nothing_to_keep(tmp_path, tiny_llama):
    with pytest.raises(QuantkitError, match="the source stores this linear unquantized"):
        quantkit.quantize(tiny_llama, keep_recipe(tmp_path, "*mlp*", ""), tmp_path / "out")
