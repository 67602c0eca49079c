"""Vision towers of multimodal models: kept, or quantized by a rule of their own, and what is said of them."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline import data_free, layers
from quantkit.compress.pipeline.plan import find_model
from quantkit.compress.recipe import load
from quantkit.errors import RecipeError
from quantkit.formats import recognise
from quantkit.huggingface.load_rules import with_tower_names
from quantkit.inspection import inspect
from quantkit.planning.estimate import find_shape
from quantkit.planning.recipes import plan_recipe
from tests.compress.pipeline.test_discover import load_wrapper
from tests.compress.pipeline.test_quantize import run
from tests.helpers import load_tensors
from tests.undescribed import IMAGE_TOKEN, make_wrapper

VISION = {
    "llava": ["*vision_tower*", "*multi_modal_projector*"],
    "gemma3": ["*vision_tower*"],
    **{family: ["*visual*"] for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
}
# Linears of the tower and projector; of Qwen2-VL less the one whose weight the model asks for its dtype.
COUNTS = {"llava": 14, "gemma3": 14, "qwen2_vl": 9, "qwen2_5_vl": 12, "qwen3_vl": 12}
# SigLIP initializes its linears' weights, so transformers decodes all, which it does rightly of one number type only.
RECIPES = {"gemma3": "rtn-int8", "qwen2_5_vl": "fp8-dynamic"}
QUICK = ("llava", "qwen2_5_vl")


def rule(family, **weights):
    return {"overrides": {"overrides": [{"modules": VISION[family], "weights": {"group_size": "channel", **weights}}]}}


def image_prompt(family):
    """Token ids with one image in them, and the image as the model takes it."""
    generator, ids = torch.Generator().manual_seed(0), torch.tensor([[1, 5, 9, *[IMAGE_TOKEN] * 4, 7, 11, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.startswith("qwen"):
        patch = 16 if family == "qwen3_vl" else 14
        inputs["pixel_values"] = torch.randn(16, 3 * 2 * patch * patch, generator=generator)
        return {**inputs, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
    inputs["pixel_values"] = torch.randn(1, 3, 28, 28, generator=generator)
    return {**inputs, "token_type_ids": (ids == IMAGE_TOKEN).int()} if family == "gemma3" else inputs


def decoded(source, output):
    """The source's model with every weight that we decode from the output."""
    files = CheckpointReader(source)
    model, reader = load_wrapper(source), ModelReader(output, with_tower_names(find_model(files)[0], files))
    format_, scheme = recognise(reader.config, "config.json")
    for name, module in model.named_modules():
        linear = scheme.find(name) if isinstance(module, torch.nn.Linear) else None
        if linear is not None:
            local = {n.removeprefix(f"{name}."): reader.tensor(n) for n in reader.names if n.startswith(f"{name}.")}
            module.weight.data = format_.decode(local, linear).dequantize(torch.float32)
    return model.eval()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in VISION]
)
def test_a_rule_of_its_own_quantizes_the_tower_and_transformers_computes_with_it(tmp_path, text_file, family):
    model, recipe = make_wrapper(tmp_path / "model", family), RECIPES.get(family, "gptq-int4")
    types = {} if recipe == "fp8-dynamic" else {"dtype": "int8"}
    result = run(model, recipe, tmp_path / "out", text_file, **rule(family, **types))
    assert len(result.tower.linears) == COUNTS[family]
    assert all(
        linear.scheme.startswith("fp8" if recipe == "fp8-dynamic" else "int8") for linear in result.tower.linears
    )
    prompt = image_prompt(family)
    with torch.no_grad():
        logits, original = (load_wrapper(folder)(**prompt).logits for folder in (tmp_path / "out", model))
        expected = decoded(model, tmp_path / "out")(**prompt).logits
    # Inputs are rounded too by fp8-dynamic, which the decoded model does not do.
    near = 0.1 * expected.abs().max().item() if recipe == "fp8-dynamic" else 1e-4
    torch.testing.assert_close(logits, expected, rtol=0, atol=near)
    assert 0 < (logits - original).norm() / original.norm() < 0.6


def test_the_rest_is_as_without_the_rule_and_the_record_says_what_was_done(tmp_path, text_file):
    model = make_wrapper(tmp_path / "model", "llava")
    kept = run(model, "gptq-int4", tmp_path / "kept", text_file)
    made = run(model, "gptq-int4", tmp_path / "made", text_file, **rule("llava", dtype="int8"))
    before, after = load_tensors(tmp_path / "kept"), load_tensors(tmp_path / "made")
    same = [name for name in before if name in after]
    assert {name for name in before if ".layers." in name and "vision" not in name} <= set(same)
    assert all(torch.equal(before[name], after[name]) for name in same)
    assert sum(name not in after for name in before) == 14
    assert kept.quantized_share == made.quantized_share == 1.0
    assert made.num_quantized == kept.num_quantized + 14
    assert made.layers[0].linears == kept.layers[0].linears
    assert inspect(tmp_path / "kept").tower.describe() == "not quantized"
    assert inspect(tmp_path / "made").tower.describe() == "quantized without data: 14 linears int8 channel"
    manifest = json.loads((tmp_path / "made" / "quantkit.json").read_text())
    assert "model-towers-00001-of-00001.safetensors" in manifest["files"]
    assert len(manifest["result"]["tower"]["linears"]) == 14


def test_a_run_that_ends_in_the_tower_goes_on_to_the_same_bytes(tmp_path, text_file, monkeypatch):
    model = make_wrapper(tmp_path / "model", "llava")
    settings = rule("llava", dtype="int8")
    monkeypatch.setattr(data_free, "_FILE_BYTES", 1 << 14)  # several files
    run(model, "gptq-int4", tmp_path / "whole", text_file, **settings)
    written = []

    def write_audited_shard(*args):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(args)
        return layers.write_audited_shard(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data_free, "write_audited_shard", write_audited_shard)
        run(model, "gptq-int4", tmp_path / "out", text_file, **settings)
    result = run(model, "gptq-int4", tmp_path / "out", text_file, **settings)
    assert result.resumed_layers == result.num_layers
    files = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.name != "quantkit-run.json")
    assert sum(name.startswith("model-towers-") for name in files) > 1
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != "quantkit-run.json")
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in files)


def test_a_pattern_of_decoder_and_tower_is_of_the_decoder_and_ignore_is_of_both(tmp_path):
    model = make_wrapper(tmp_path / "model", "llava")
    both = {"modules": "*q_proj", "weights": {"dtype": "int8", "group_size": 32}}
    alike = {"modules": ["*k_proj", "*v_proj"], "weights": {"dtype": "int8", "group_size": 32}}
    assert not run(model, "rtn-int8", tmp_path / "a", overrides={"overrides": [both, alike]}).tower.linears
    some = rule("llava", dtype="int8")["overrides"]
    result = run(model, "rtn-int8", tmp_path / "b", overrides={**some, "ignore": ["*vision_tower*fc?", "*.o_proj"]})
    assert len(result.tower.linears) == 10
    assert result.tower.describe().endswith("; 4 not quantized")


@pytest.mark.parametrize(
    ("recipe", "modules", "changes", "says"),
    [
        (
            "rtn-int8",
            "*visuel*",
            {},
            r"matches no linear of this model; correct it: names look like '.*' or 'model\.vision_tower",
        ),
        ("w8a8-int8", "*vision_tower*", {"activations.dynamic": False}, "sees no calibration data"),
    ],
)
def test_what_cannot_be_done_to_a_tower_is_refused(tmp_path, text_file, recipe, modules, changes, says):
    model = make_wrapper(tmp_path / "model", "llava")
    override = {"modules": modules, "weights": {"dtype": "int8", "group_size": "channel"}}
    with pytest.raises(RecipeError, match=says):
        run(model, recipe, tmp_path / "out", text_file, overrides={"overrides": [override], **changes})
    assert not (tmp_path / "out").exists()


def test_codes_of_the_source_are_kept_in_decoder_layers_only(tmp_path):
    model = make_wrapper(tmp_path / "model", "llava")
    with pytest.raises(RecipeError, match="matches only linears outside the decoder layers"):
        run(model, "rtn-int8", tmp_path / "out", overrides={"overrides": [{"modules": "*vision*", "keep": "source"}]})


def test_a_plan_does_not_take_a_rule_of_towers_for_a_mistake(tmp_path):
    shape = find_shape(make_wrapper(tmp_path / "model", "llava"), None, None)
    settings = rule("llava", dtype="int8")["overrides"]
    assert plan_recipe(shape, load("rtn-int8", settings)).conflicts == ()
