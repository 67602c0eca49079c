"""Checkpoints as transformers will load them: its own names, what it cannot load, and the proof at the end."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from quantkit.compress.pipeline import finish
from quantkit.compress.pipeline.loadability import _together
from quantkit.errors import GateFailure, ModelError
from quantkit.huggingface.load_rules import HfLoader, Problems, Stored, _Made
from quantkit.huggingface.names import Destination, Renaming
from tests.compress.pipeline.test_quantize import IDS, run
from tests.helpers import known_to_transformers, load_tensors, make_model, transformers_logits
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
    assert any("24 linears such as" in note for note in result.warnings)
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


@pytest.mark.skipif(not known_to_transformers("hrm_text"), reason="transformers has no hrm_text")
def test_codes_are_never_compared_with_the_values_that_files_join(tmp_path):
    """Before, `torch.equal` of FP8 codes and float32 values ended the run."""
    model = make_undescribed(tmp_path / "model", "hrm_text")
    run(model, "fp8-dynamic", tmp_path / "out")
    assert load_tensors(tmp_path / "out")["model.L_module.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_what_one_rule_makes_is_known_of_every_layer():
    made = _Made.by_rule("m.0.mlp.gate_proj.weight", ["m.0.mlp.gate_proj.weight", "m.0.mlp.up_proj.weight"])
    assert made.of("m.1.mlp.gate_proj.weight") == {"m.1.mlp.gate_proj.weight", "m.1.mlp.up_proj.weight"}
    alone = _Made.by_rule("m.0.experts.down_proj", ["m.0.experts.down_proj"])
    assert alone.of("m.3.experts.down_proj") == {"m.3.experts.down_proj"}


def test_a_model_of_which_transformers_loads_no_codes_is_refused_before_the_work(tmp_path, monkeypatch):
    """Its quantizer makes rules of its own, which fails where one of the model's cuts a tensor into several."""
    original = Renaming.of

    def of(model, quantizer=None):
        if quantizer is not None:
            raise ValueError("you can only have one to many, one to one or many to one")
        return original(model)

    model = make_undescribed(tmp_path / "model", "diffllama")
    monkeypatch.setattr(Renaming, "of", of)
    with pytest.raises(ModelError, match=r"could not load any linear of the model .*one to many"):
        run(model, "rtn-int8", tmp_path / "out")


def test_what_would_not_load_beside_codes_is_refused_before_the_work(tmp_path, monkeypatch):
    model = make_undescribed(tmp_path / "model", "diffllama")
    problems = Problems(unconverted={"vision.experts.down_proj": "its converted values are wrong"})
    monkeypatch.setattr(HfLoader, "check", lambda *_: problems)
    with pytest.raises(
        ModelError, match=r"vision\.experts\.down_proj unquantized beside quantized linears \(its converted"
    ):
        run(model, "rtn-int8", tmp_path / "out")


def test_codes_are_under_one_module():
    """Inkling 2 calls a weight `weight_proj` without `.weight`, and its scale would be called otherwise."""

    class Reader:
        def stored_name(self, name):
            return {"m.k.weight_proj.weight": "f.k.weight_proj"}.get(name, name)

    assert not _together(Reader(), "m.k.weight_proj", ["weight", "weight_scale"])
    assert _together(Reader(), "m.k.weight_proj", ["weight_packed", "weight_scale"])


@pytest.mark.parametrize("family", ["gpt_oss", "minimax_m2"])
def test_experts_that_are_known_not_to_load_hide_no_other_problem(tmp_path, monkeypatch, family, text_file):
    recipe = "rtn-int8" if family == "gpt_oss" else "w8a8-int8"
    model = make_model(tmp_path / "model", family)
    result = run(model, recipe, tmp_path / "right", text_file)
    why = "it does not load" if family == "gpt_oss" else "it has no rule that joins INT8 experts"
    assert any(why in note and "own LLM" in note for note in result.warnings)
    monkeypatch.setattr(finish, "check_loads", _without(finish.check_loads, "layers.0.self_attn.o_proj.weight_scale"))
    with pytest.raises(GateFailure, match=r"self_attn\.o_proj\.weight_scale"):
        run(model, recipe, tmp_path / "out", text_file)


def _without(original, ending):
    """`check_loads` of a checkpoint without a tensor."""

    def damaged(folder, *others, **options):
        tensors = {name: value.clone() for name, value in load_tensors(folder).items() if not name.endswith(ending)}
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return original(folder, *others, **options)

    return damaged


def test_zero_points_may_be_packed_in_files_only():
    """As with transformers 5.17, whose model without weights has them unpacked; other shapes are compared."""
    shapes = {"m.weight_packed": (256, 64), "m.weight_zero_point": (256, 4), "m.weight_scale": (256, 4)}
    stored = {**shapes, "m.weight_zero_point": (32, 4), "m.weight_scale": (255, 4)}
    loader = HfLoader.__new__(HfLoader)
    loader._rules = SimpleNamespace(
        shapes=shapes,
        destinations=lambda names: {name: Destination(target=name, renamed=name, pattern=None) for name in names},
    )
    loader._model = SimpleNamespace(_adjust_missing_and_unexpected_keys=lambda info: None), None
    tensors = {name: Stored(module="m", kind="int4", shape=shape) for name, shape in stored.items()}
    problems = loader.check(tensors, lambda name: torch.zeros(1), lambda module: ("m.weight", torch.zeros(1)))
    assert problems.summary == "1 with a different shape, e.g. m.weight_scale [255, 4] instead of [256, 4]"


@pytest.mark.parametrize("damage", ["scale", "shape", "name"])
def test_a_checkpoint_that_would_not_load_fails_with_exit_code_three(tmp_path, monkeypatch, damage):
    model = make_undescribed(tmp_path / "model", "diffllama")
    original = finish.check_loads

    def damaged(folder, *others, **options):
        shard = folder / "model-00001-of-00003.safetensors"
        tensors = {name: value.clone() for name, value in load_tensors(shard.parent).items()}
        name = "model.layers.0.mlp.up_proj.weight_scale"
        value = tensors.pop(name)
        tensors |= {"scale": {}, "shape": {name: value[:-1].clone()}, "name": {f"{name}s": value}}[damage]
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return original(folder, *others, **options)

    monkeypatch.setattr(finish, "check_loads", damaged)
    with pytest.raises(GateFailure, match=r"mlp\.up_proj\.weight_scale") as caught:
        run(model, "rtn-int8", tmp_path / "out")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()
