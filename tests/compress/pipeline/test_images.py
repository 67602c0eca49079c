"""Calibration with images: what enters each layer is what it is in transformers, for texts and images in turns."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText

from quantkit.compress.calibration import images
from quantkit.compress.pipeline import layers
from quantkit.compress.pipeline.inputs import embed, read_samples
from quantkit.compress.pipeline.plan import build_plan
from quantkit.compress.recipe import load
from quantkit.errors import InputError, ModelError
from quantkit.huggingface.layer_call import LayerCall, hidden_states
from quantkit.huggingface.layer_inputs import compute_with
from quantkit.results import CompressionResult
from tests.compress.pipeline.test_quantize import run
from tests.helpers import load_tensors
from tests.undescribed import QwenProcessor, make_wrapper, save_processor

SMALL = {"calibration.images": "bundled", "calibration.samples": 12, "calibration.sequence_length": 128}


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    """By family, with a processor, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = make_wrapper(tmp_path_factory.mktemp(family), family)
            if not family.startswith("qwen"):
                save_processor(made[family], family)
        return made[family]

    return make


def plan_of(folder, output, **changes):
    fields = {**SMALL, "weights.group_size": 32, **changes}
    return build_plan(
        str(folder), load("gptq-int4", [f"{key}={value}" for key, value in fields.items()]), output, "cpu"
    )


@pytest.mark.parametrize(
    "family", ["llava", "qwen2_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3_vl"))]
)
def test_layers_get_what_they_get_in_transformers(wrapper, tmp_path, monkeypatch, family):
    """Positions of Qwen's three axes, images that see themselves in Gemma, towers that add to later layers."""
    folder = wrapper(family)
    if family.startswith("qwen"):
        monkeypatch.setattr(images, "load_processor", QwenProcessor)
    plan = plan_of(folder, tmp_path / "out")
    samples = read_samples(plan)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    norm = model.get_submodule(plan.family.final_norm)
    batches = list(embed(plan, samples))
    assert [isinstance(batch, LayerCall) for batch in batches[:3]] == [True, False, True]
    assert sum(batch.shape[0] for batch in batches) == 12
    calls = [batch for batch in batches if isinstance(batch, LayerCall)]
    for call, (ids, inputs) in zip(calls, samples.images.inputs(), strict=True):
        with torch.no_grad():
            expected = model(**inputs, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(call.token_ids, ids)
        for index in range(plan.skeleton.num_layers):
            call = LayerCall.of_tensors(call.tensors())  # as it is saved and read again
            layer = plan.skeleton.layer(index)
            output = hidden_states(layer(call.hidden.clone(), **plan.skeleton.arguments(index, call)))
            if index + 1 < plan.skeleton.num_layers:
                call = plan.skeleton.next_call(index, call, compute_with(layer))
        torch.testing.assert_close(norm(output), expected, rtol=0, atol=1e-6)


def test_a_run_says_how_many_samples_had_images(wrapper, tmp_path, text_file):
    result = run(wrapper("llava"), "awq-int4", tmp_path / "out", text_file, overrides=SMALL)
    assert (result.calibration.num_samples, result.calibration.num_with_images) == (12, 8)
    described = result.calibration.describe()
    assert described.startswith("12 samples (8 with images), ")
    assert described.endswith(" tokens in all; 128 other tokens held out")
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["result"]["calibration"]["num_with_images"] == 8
    assert CompressionResult.from_dict(result.to_dict()) == result


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["awq-int4", "gptq-int4"])
def test_images_change_the_result_and_a_stopped_run_goes_on_with_them(
    wrapper, tmp_path, text_file, monkeypatch, recipe
):
    folder, write = wrapper("llava"), layers.write_layer
    for name, number in (("whole", 12), ("fewer", 8)):
        changes = {**SMALL, "calibration.samples": number}
        run(folder, recipe, tmp_path / name, text_file, overrides=changes)
    monkeypatch.setattr(layers, "write_layer", lambda *args: sys.exit(1) if args[1] else write(*args))
    with pytest.raises(SystemExit):
        run(folder, recipe, tmp_path / "again", text_file, overrides=SMALL)
    monkeypatch.undo()
    resumed = run(folder, recipe, tmp_path / "again", text_file, overrides=SMALL, activations="disk")
    assert resumed.resumed_layers == 1
    whole, again, fewer = (load_tensors(tmp_path / name) for name in ("whole", "again", "fewer"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert any(not torch.equal(whole[name], fewer[name]) for name in whole)


def test_a_model_without_images_or_a_processor_is_refused(wrapper, tmp_path, tiny_llama, text_file, monkeypatch):
    with pytest.raises(ModelError, match=r"does not accept images; leave calibration\.images out"):
        run(tiny_llama, "gptq-int4", tmp_path / "out", text_file, overrides=SMALL)
    bare = make_wrapper(tmp_path / "bare", "llava")
    with pytest.raises(ModelError, match=r"its image processor cannot be loaded: .*preprocessor_config"):
        run(bare, "gptq-int4", tmp_path / "out", text_file, overrides=SMALL)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"needs Pillow; run pip install 'quantkit-lm\[images\]'"):
        run(wrapper("llava"), "gptq-int4", tmp_path / "out", text_file, overrides=SMALL)
    assert not (tmp_path / "out").exists()
