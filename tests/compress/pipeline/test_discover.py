"""Models that no file describes, and language models inside wrappers, all the way to what transformers loads."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.plan import find_model
from quantkit.errors import ModelError
from quantkit.formats import REGISTRY as FORMATS
from tests.compress.pipeline.test_quantize import IDS, decode_linears, run
from tests.helpers import edit_config, known_to_transformers, load_tensors, make_model, one_of_each, transformers_logits
from tests.undescribed import IMAGE_TOKEN, MIXTURES, UNDESCRIBED, WRAPPERS, make_undescribed, make_wrapper

RECIPES = ("gptq-int4", "awq-int4", "rtn-int8", "fp8-dynamic")


@pytest.fixture(scope="module")
def undescribed(request, tmp_path_factory):
    return make_undescribed(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def wrapper(request, tmp_path_factory):
    return make_wrapper(tmp_path_factory.mktemp(request.param), request.param)


def decode_into(model, source, output):
    """Give a model of the source the weights that we decode from the output, and quantized inputs where they are."""
    family, _ = find_model(CheckpointReader(source))
    reader = ModelReader(output, family)
    format_ = next(f for f in FORMATS.all().values() if f.recognise(reader.config))
    scheme = format_.recognise(reader.config)
    decode_linears(model, reader, format_, scheme)
    for name, parameter in model.named_parameters():  # norms and biases that took a scale
        quantized = scheme.find(name.removesuffix(".weight")) is not None and parameter.dim() == 2
        if name in reader and name.startswith(f"{family.layers}.") and not quantized:
            parameter.data = reader.tensor(name).float()
    return model.eval()


@pytest.mark.parametrize(("undescribed", "recipe"), one_of_each(sorted(UNDESCRIBED), RECIPES), indirect=["undescribed"])
def test_undescribed_models_load_in_transformers(undescribed, tmp_path, text_file, recipe):
    from transformers import AutoModelForCausalLM

    result = run(undescribed, recipe, tmp_path / "out", text_file)
    expected = AutoModelForCausalLM.from_pretrained(undescribed, dtype=torch.float32)
    with torch.no_grad():
        logits = decode_into(expected, undescribed, tmp_path / "out")(input_ids=IDS).logits
    actual = transformers_logits(tmp_path / "out", IDS)
    torch.testing.assert_close(actual, logits, rtol=0, atol=1e-4)
    original = transformers_logits(undescribed, IDS)
    assert 0 < (actual - original).norm() / original.norm() < 0.6
    assert result.warnings[0].startswith("no family file for ")
    assert all(layer.linears for layer in result.layers)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["discovered"]["summary"] == result.warnings[0]
    assert manifest["identity"]["discovered"]["modules"] == manifest["discovered"]["modules"]


def test_awq_smooths_what_was_found(tmp_path, text_file):
    """At eight bits folding must not add to the error of rounding; norms have changed, so it was done."""
    model = make_undescribed(tmp_path / "model", "lfm2")
    expected, wrong = transformers_logits(model, IDS), {}
    for recipe in ("awq-int4", "rtn-int4"):
        run(model, recipe, tmp_path / recipe, text_file, overrides={"weights.dtype": "int8"})
        wrong[recipe] = (transformers_logits(tmp_path / recipe, IDS) - expected).norm() / expected.norm()
    assert wrong["awq-int4"] < 1.2 * wrong["rtn-int4"]
    before, after = load_tensors(model), load_tensors(tmp_path / "awq-int4")
    assert not torch.equal(before["model.layers.0.operator_norm.weight"], after["model.layers.0.operator_norm.weight"])


def test_a_run_that_was_interrupted_resumes_bit_for_bit(tmp_path, text_file):
    from quantkit.compress.pipeline import layers as pipeline_layers

    model = make_undescribed(tmp_path / "model", "lfm2")
    run(model, "gptq-int4", tmp_path / "whole", text_file)
    original, calls = pipeline_layers.write_layer, []

    def stop(plan, index, layer, folder):
        calls.append(index)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(plan, index, layer, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_layers, "write_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            run(model, "gptq-int4", tmp_path / "parts", text_file)
    assert run(model, "gptq-int4", tmp_path / "parts", text_file).resumed_layers == 1
    first, second = load_tensors(tmp_path / "whole"), load_tensors(tmp_path / "parts")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", sorted(filter(known_to_transformers, MIXTURES)))
def test_experts_that_no_file_describes_load_in_transformers(tmp_path, family):
    model = make_undescribed(tmp_path / "model", family)
    result = run(model, "rtn-int8", tmp_path / "out")
    assert sum(".experts." in linear.name for linear in result.layers[-1].linears) == 12
    actual, original = (transformers_logits(folder, IDS) for folder in (tmp_path / "out", model))
    assert 0 < (actual - original).norm() / original.norm() < 0.1


def test_two_schemes_in_a_wrapper_are_found_by_module_and_by_file_names(tmp_path):
    model = make_wrapper(tmp_path / "model", "llava")
    override = {"modules": "*.mlp.down_proj", "weights": {"dtype": "int4", "group_size": 32}}
    run(model, "rtn-int8", tmp_path / "out", overrides={"overrides": [override]})
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    few = next(group["targets"] for group in groups.values() if group["weights"]["num_bits"] == 4)
    assert {"model.language_model.layers.1.mlp.down_proj", "language_model.model.layers.1.mlp.down_proj"} <= set(few)
    source = load_wrapper(model)
    with torch.no_grad():
        logits = load_wrapper(tmp_path / "out")(input_ids=IDS).logits
        expected = decode_into(source, model, tmp_path / "out")(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_an_encoder_with_a_decoder_is_refused_before_any_work(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(ModelError, match="is an encoder-decoder model; quantkit compresses only decoder-only") as error:
        run(model, "rtn-int8", tmp_path / "out")
    assert error.value.exit_code == 4
    assert not (tmp_path / "out").exists()


def test_a_class_that_transformers_does_not_have_is_refused(tmp_path):
    model = make_model(tmp_path / "model")
    edit_config(model, architectures=["FooForCausalLM"], model_type="foo")
    with pytest.raises(ModelError, match="transformers cannot build this model"):
        run(model, "rtn-int8", tmp_path / "out")


def load_wrapper(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def image_features(model):
    """What the vision side makes of a picture."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        if model.config.model_type.startswith("qwen"):
            width = 3 * 2 * model.config.vision_config.patch_size**2
            features = model.get_image_features(torch.randn(16, width, generator=generator), torch.tensor([[1, 4, 4]]))
        else:
            features = model.get_image_features(torch.randn(1, 3, 28, 28, generator=generator))
    features = getattr(features, "pooler_output", features)
    return torch.cat(list(features)) if isinstance(features, (tuple, list)) else features


@pytest.mark.parametrize(("wrapper", "recipe"), one_of_each(sorted(WRAPPERS), RECIPES), indirect=["wrapper"])
def test_the_language_model_in_a_wrapper_is_quantized_and_the_rest_is_as_it_was(wrapper, tmp_path, text_file, recipe):
    run(wrapper, recipe, tmp_path / "out", text_file)
    source, actual = load_wrapper(wrapper), load_wrapper(tmp_path / "out")
    assert torch.equal(image_features(actual), image_features(source))
    with torch.no_grad():
        logits = actual(input_ids=IDS).logits
        original = source(input_ids=IDS).logits
        expected = decode_into(source, wrapper, tmp_path / "out")(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert 0 < (logits - original).norm() / original.norm() < 0.6
    before, after = load_tensors(wrapper), load_tensors(tmp_path / "out")
    rest = [name for name in before if ".layers." not in name or "visual" in name or "vision" in name]
    assert len(rest) > 10
    for name in rest:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(source).__name__]
    assert IMAGE_TOKEN in (config.get("image_token_id"), config.get("image_token_index"))


def rename(folder, *pairs):
    """Write a checkpoint's tensors under other names."""
    from safetensors.torch import save_file

    tensors = {}
    for name, value in load_tensors(folder).items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        tensors[name] = value.clone()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_both_layouts_of_a_wrapper_give_the_same_codes(tmp_path, text_file):
    """Files keep the names of the day on which they were written: before and since transformers moved its modules."""
    old, new = (make_wrapper(tmp_path / name, "llava") for name in ("old", "new"))
    pairs = (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    )
    rename(old, *((b, a) for a, b in pairs))
    rename(new, *pairs)
    assert "language_model.lm_head.weight" in load_tensors(old)
    assert "lm_head.weight" in load_tensors(new)
    logits = []
    for model in (old, new):
        output = tmp_path / f"{model.name}-out"
        run(model, "gptq-int4", output, text_file)
        assert {n for n in load_tensors(model) if "layers" not in n} <= set(load_tensors(output))
        with torch.no_grad():
            logits.append(load_wrapper(output)(input_ids=IDS).logits)
    assert torch.equal(*logits)
