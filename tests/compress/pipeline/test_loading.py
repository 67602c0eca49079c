"""Checkpoints as transformers will load them: its own names, what it cannot load, and the proof at the end."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from quantkit.compress.pipeline import finish
from quantkit.errors import GateFailure
from tests.compress.pipeline.test_quantize import IDS, run
from tests.helpers import known_to_transformers, load_tensors, transformers_logits
from tests.undescribed import RENAMED, make_undescribed


def error(actual, original):
    return float((actual - original).norm() / original.norm())


@pytest.mark.parametrize("family", sorted(filter(known_to_transformers, RENAMED)))
def test_models_whose_tensors_are_renamed_load_in_transformers(tmp_path, family):
    """Before, tensors of all but Mamba were called missing, and Mamba's codes did not load."""
    model = make_undescribed(tmp_path / "model", family)
    result = run(model, "rtn-int8", tmp_path / "out")
    actual, original = (transformers_logits(folder, IDS) for folder in (tmp_path / "out", model))
    assert 0 < error(actual, original) < 0.25
    assert 0 < result.quantized_share <= 1
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section.get("dequantize", False) == (family == "mamba")


@pytest.mark.skipif(not known_to_transformers("aria_text"), reason="transformers has no aria_text")
def test_experts_that_transformers_cannot_load_are_left_and_said(tmp_path):
    model = make_undescribed(tmp_path / "model", "aria_text")
    result = run(model, "rtn-int8", tmp_path / "out")
    assert not any(".experts." in linear.name for layer in result.layers for linear in layer.linears)
    assert any("transformers would not load them as compressed-tensors: 24 linears" in note for note in result.warnings)
    assert 0 < result.quantized_share < 0.9
    assert any("experts" in kind for kind in result.unquantized)
    before, after = load_tensors(model), load_tensors(tmp_path / "out")
    kept = [name for name in before if ".experts.fc" in name]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.skipif(not known_to_transformers("nemotron_h"), reason="transformers has no nemotron_h")
def test_what_transformers_joins_keeps_its_form_where_that_loads(tmp_path):
    """Beside FP8 weights experts are joined while loading; beside packed integers transformers drops them."""
    model = make_undescribed(tmp_path / "model", "nemotron_h")
    for recipe, apart in (("fp8-dynamic", True), ("rtn-int8", False)):
        run(model, recipe, tmp_path / recipe)
        names = load_tensors(tmp_path / recipe)
        assert any(".experts.0." in name for name in names) == apart
        assert any(name.endswith(".experts.up_proj") for name in names) != apart


@pytest.mark.parametrize("damage", ["scale", "shape", "name"])
def test_a_checkpoint_that_would_not_load_fails_with_exit_code_three(tmp_path, monkeypatch, damage):
    model = make_undescribed(tmp_path / "model", "diffllama")
    original = finish.check_loads

    def damaged(folder, *others):
        shard = folder / "model-00001-of-00003.safetensors"
        tensors = {name: value.clone() for name, value in load_tensors(shard.parent).items()}
        name = "model.layers.0.mlp.up_proj.weight_scale"
        value = tensors.pop(name)
        tensors |= {"scale": {}, "shape": {name: value[:-1].clone()}, "name": {f"{name}s": value}}[damage]
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return original(folder, *others)

    monkeypatch.setattr(finish, "check_loads", damaged)
    with pytest.raises(GateFailure, match=r"mlp\.up_proj\.weight_scale") as caught:
        run(model, "rtn-int8", tmp_path / "out")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()
