"""A recipe's KV cache in the checkpoint: scales against what transformers caches, records, other readers, refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import quantkit
from quantkit import LLM
from quantkit.checkpoints.kv_cache_entries import CONFIG_KEY
from quantkit.compress.calibration.dataset import load_samples
from quantkit.compress.pipeline import kv_cache as stage
from quantkit.compress.pipeline import layers
from quantkit.compress.pipeline import run as pipeline
from quantkit.compress.recipe.load import build
from quantkit.errors import AuditError, ModelError, RecipeError, SchemeError
from quantkit.huggingface.layer_call import cache_argument
from quantkit.planning.estimate import estimate
from tests.compress.pipeline.kv_models import DEMO, perplexity, plant_outliers
from tests.helpers import edit_config, edit_tensors, load_tensors, make_model, transformers_logits

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "phi3", "cohere2", "granite")


def quantize(model, output, text_file, recipe="kv-fp8", samples=6, **changes):
    overrides = {
        "calibration.data": str(text_file),
        "calibration.samples": samples,
        "calibration.sequence_length": 48,
        **{f"kv_cache.{name}": value for name, value in changes.items()},
    }
    return quantkit.quantize(str(model), recipe, output, overrides=overrides)


def cached_by_transformers(model, text_file, samples=6):
    """Largest |key| and |value| of each layer and head that transformers' own cache holds after the samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(model)
    actual = load_samples(text_file, tokenizer, samples=samples, sequence_length=48, vocab_size=260, seed=0)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    peaks = None
    for sample in actual.token_ids:
        cache = DynamicCache()
        with torch.no_grad():
            network(torch.tensor([sample]), past_key_values=cache, use_cache=True)
        here = torch.stack([torch.stack([item.abs().amax((0, 2, 3)) for item in pair]) for pair in pairs(cache)])
        peaks = here if peaks is None else torch.maximum(peaks, here)
    return peaks  # (layers, 2, H)


def pairs(cache):
    layers = getattr(cache, "layers", None)
    return [(layer.keys, layer.values) for layer in layers] if layers is not None else list(cache)


def attention_is_known():
    """compressed-tensors finds attention by the name of its cache, which is another from transformers 5.24 on."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    return "past_key_value" in (cache_argument(LlamaAttention.forward) or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scales_in_the_checkpoint_are_the_calibrated_ones(tmp_path, text_file, family):
    """After norms, rotation and windows, as transformers caches them; per tensor and per head."""
    model = make_model(tmp_path / "model", family)
    expected = cached_by_transformers(model, text_file)
    attention = "gpt_neox.layers.{}.attention" if family == "gpt_neox" else "model.layers.{}.self_attn"
    for granularity in ("tensor", "head"):
        result = quantize(model, tmp_path / granularity, text_file, granularity=granularity)
        said = any("ignores the scales of this model's KV cache" in text for text in result.warnings)
        assert said == (family == "gpt_neox" or not attention_is_known())
        tensors = load_tensors(tmp_path / granularity)
        for index, peaks in enumerate(expected):
            for name, peak in zip("kv", peaks, strict=True):
                scale = tensors[f"{attention.format(index)}.{name}_scale"]
                assert scale.dtype == torch.float32
                assert scale.shape == ((1,) if granularity == "tensor" else (len(peak), 1, 1))
                largest = peak.max().reshape(1) if granularity == "tensor" else peak.view(-1, 1, 1)
                torch.testing.assert_close(scale, largest / 448, rtol=1e-5, atol=0)
                recorded = getattr(result.layers[index].kv_cache, {"k": "key_scale", "v": "value_scale"}[name])
                assert scale.flatten().tolist() == list(recorded)


def test_transformers_takes_the_scales_and_leaves_what_is_ours(tiny_llama, tmp_path, text_file):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(2, 62).view(2, 30)
    original = transformers_logits(tiny_llama, ids)
    for granularity in ("tensor", "head"):
        quantize(tiny_llama, tmp_path / granularity, text_file, granularity=granularity)
        section = json.loads((tmp_path / granularity / "config.json").read_text())["quantization_config"]
        assert section["kv_cache_scheme"]["strategy"] == {"tensor": "tensor", "head": "attn_head"}[granularity]
        model, said = AutoModelForCausalLM.from_pretrained(
            tmp_path / granularity, dtype=torch.float32, output_loading_info=True
        )
        assert not any(said[key] for key in ("missing_keys", "mismatched_keys"))
        assert all(key.endswith(("k_scale", "v_scale")) for key in said["unexpected_keys"])
        assert bool(said["unexpected_keys"]) != attention_is_known()
        if not attention_is_known():  # which the run has warned of
            assert torch.equal(model(ids).logits, original)
            continue
        assert "model.layers.1.self_attn.v_scale" in dict(model.named_parameters())
        assert 0 < (model(ids).logits - original).norm() / original.norm() < 0.3  # it rounds as FP8 does
    quantize(tiny_llama, tmp_path / "int8", text_file, dtype="int8", granularity="token")
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config[CONFIG_KEY]["keys"] == {"dtype": "int8", "granularity": "token"}
    assert torch.equal(transformers_logits(tmp_path / "int8", ids), original)


def test_weights_that_are_ignored_are_the_source_bit_for_bit(tiny_llama, tmp_path, text_file):
    result = quantize(tiny_llama, tmp_path / "out", text_file)
    source, written = load_tensors(tiny_llama), load_tensors(tmp_path / "out")
    assert written.keys() - source.keys() == {
        f"model.layers.{index}.self_attn.{side}_scale" for index in (0, 1) for side in "kv"
    }
    assert all(torch.equal(source[name], written[name]) for name in source)
    assert (result.num_quantized, result.bits_per_weight) == (0, 32.0)


def test_bits_per_weight_of_what_is_ignored_are_the_stored_ones(tmp_path, text_file):
    """CPUs compute in float32 where the checkpoint has float16."""
    model = make_model(tmp_path / "model", dtype=torch.float16)
    assert quantize(model, tmp_path / "out", text_file).bits_per_weight == 16.0


def test_keys_are_observed_with_the_weights_as_they_are_written(tiny_llama, tmp_path, text_file):
    """Scales of quantized weights are those of the dense checkpoint that holds the decoded values."""
    weights = {"weights": {"dtype": "int4", "group_size": 16}, "kv_cache": {"dtype": "fp8"}}
    sizes = {"data": str(text_file), "samples": 6, "sequence_length": 48}
    recipe = build({"name": "x", **weights, "calibration": sizes}, "x.yaml")
    pipeline.quantize(str(tiny_llama), recipe, tmp_path / "codes")
    plain = build({"name": "x", "weights": weights["weights"], "format": "dense"}, "x.yaml")
    pipeline.quantize(str(tiny_llama), plain, tmp_path / "dense")
    expected = cached_by_transformers(tmp_path / "dense", text_file)
    tensors = load_tensors(tmp_path / "codes")
    actual = torch.stack([tensors[f"model.layers.{index}.self_attn.k_scale"][0] for index in (0, 1)])
    torch.testing.assert_close(actual, expected[:, 0].amax(1) / 448, rtol=1e-4, atol=0)
    before = cached_by_transformers(tiny_llama, text_file)[:, 0].amax(1) / 448
    assert ((actual - before).abs() / before).max() > 1e-3  # the test sees the difference


def test_a_killed_run_goes_on_bit_for_bit(tiny_llama, tmp_path, text_file, monkeypatch):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    quantize(tiny_llama, undisturbed, text_file, granularity="head")
    original = layers.choose_cache

    def dies(goal, architecture, layer):
        if layer.name.endswith(".1"):
            raise KeyboardInterrupt
        return original(goal, architecture, layer)

    monkeypatch.setattr(layers, "choose_cache", dies)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_llama, killed, text_file, granularity="head")
    monkeypatch.setattr(layers, "choose_cache", original)
    assert quantize(tiny_llama, killed, text_file, granularity="head").resumed_layers == 1
    for path in undisturbed.iterdir():
        if path.name != "quantkit-run.json":
            assert path.read_bytes() == (killed / path.name).read_bytes(), path.name


@pytest.mark.parametrize("steps", [[], ["gptq"]])
def test_layers_may_differ(tmp_path, text_file, steps):
    """With and without calibration: config.json, the engine and the plan agree about every layer."""
    layers = [
        {"numbers": 1, "keys": {"dtype": "int8"}, "values": {"dtype": "int2"}},
        {"numbers": [2], "skip": True},
    ]
    section = {"dtype": "int4", "outliers": "off", "layers": layers}
    data = {"name": "x", "weights": {"dtype": "int8"}, "kv_cache": section, "steps": steps}
    if steps:
        data["calibration"] = {"data": str(text_file), "samples": 4, "sequence_length": 48}
    recipe = tmp_path / "x.yaml"
    recipe.write_text(json.dumps(data))
    out = tmp_path / "out"
    quantkit.quantize(None, recipe, out)
    found = LLM(out, threads=1).engine.runner.cache.layouts
    expected = ["int4 int4", "int8 int2", "none", *["int4 int4"] * (len(found) - 3)]
    assert [cached(layout.scheme) for layout in found] == expected
    planned = estimate(recipe=recipe).recipe.cache
    assert [(planned.of(index).key.bits, planned.of(index).value.bits) for index in range(3)] == [
        (4, 4),
        (8, 2),
        (16, 16),
    ]
    data["kv_cache"]["layers"][0]["numbers"] = 99
    recipe.write_text(json.dumps(data))
    with pytest.raises(RecipeError, match="there is no layer 99; this model has layers 0 to"):
        quantkit.quantize(None, recipe, tmp_path / "none")


def cached(scheme):
    return f"{scheme.key.dtype.name} {scheme.value.dtype.name}" if scheme.is_quantized else "none"


def test_a_scale_that_is_not_the_calibrated_one_is_caught(tiny_llama, tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(stage, "cache_tensors", lambda name, *scales, by_head: {f"{name}.k_scale": torch.ones(1)})
    with pytest.raises(AuditError, match=r"k_scale is \[1.0\], but the calibrated one is"):
        quantize(tiny_llama, tmp_path / "out", text_file)
    with pytest.raises(AuditError, match="zero, negative or not finite"):
        stage.check_scales({"k_scale": torch.zeros(1)})


def test_what_cannot_be_done_is_refused_early(tiny_llama, tmp_path, text_file):
    mixed = shutil.copytree(tiny_llama, tmp_path / "mixed")
    edit_config(mixed, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ModelError, match=r"keep a state instead of keys and values \(linear_attention\)"):
        quantize(mixed, tmp_path / "out", text_file)
    assert not (tmp_path / "out.partial").exists()
    latent = shutil.copytree(tiny_llama, tmp_path / "latent")
    edit_config(latent, kv_lora_rank=16)
    with pytest.raises(ModelError, match="caches a latent"):
        quantize(latent, tmp_path / "out", text_file)
    for changes, message in (
        ({"format": "dense"}, "cannot store scales of the KV cache"),
        ({"format": "gguf", "kv_cache.granularity": "token"}, "cannot describe a KV cache"),
    ):
        with pytest.raises(SchemeError, match=message):
            quantkit.quantize(str(tiny_llama), "kv-fp8", tmp_path / "out", overrides=changes)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return plant_outliers(tmp_path_factory.mktemp("planted") / "qwen2")


def cache_recipe(**section):
    sizes = {"data": str(DEMO / "calibration.txt"), "samples": 8, "sequence_length": 192}
    data = {"name": "x", "kv_cache": section}
    return build(data if section.get("outliers") == "off" else {**data, "calibration": sizes}, "x.yaml")


def test_planted_outliers_are_found_and_int4_survives_them(planted, tmp_path):
    """It computes what the demo model does; not so with keys naively in 4 bits, but so once found and remedied."""
    exact = perplexity(LLM(planted, dtype="float32", kv_cache="fp32", threads=1))
    unplanted = perplexity(LLM(None, dtype="float32", kv_cache="fp32", threads=1))
    assert exact == pytest.approx(unplanted, rel=1e-3)
    actual = {}
    for name, section in {
        "naive": {"outliers": "off"},
        "detected": {},
        "fp8": {"remedy": "fp8"},
    }.items():
        recipe = cache_recipe(dtype="int4", granularity="token", **section)
        result = pipeline.quantize(str(planted), recipe, tmp_path / name)
        llm = LLM(tmp_path / name, dtype="float32", threads=1)
        actual[name] = perplexity(llm)
        kept = [layout.scheme.key.describe() for layout in llm.engine.runner.cache.layouts]
        ours = [layer.index for layer in result.layers if any("have outlier channels" in note for note in layer.notes)]
        if name == "naive":
            assert (set(kept), ours) == ({"int4 per token asymmetric"}, [])
        else:
            remedy = {"detected": "int4 per channel asymmetric", "fp8": "fp8 per token"}[name]
            assert {1, 2} <= set(ours) < {0, 1, 2, 3}  # layer 0 of the demo model has outliers of its own
            assert [kind == remedy for kind in kept] == [index in ours for index in range(4)]
            assert "bias of the key projection up to 128" in result.layers[1].notes[0]
            assert json.loads((tmp_path / name / "quantkit.json").read_text())["result"]["layers"][1]["notes"]
    assert actual["naive"] > 1.3 * exact
    assert actual["detected"] < 1.02 * exact
    assert actual["fp8"] < 1.02 * exact


def test_a_cache_described_by_the_source_is_replaced(tmp_path, text_file):
    """Scales and entries of a checkpoint whose weights were ignored, or of another tool."""
    model = make_model(tmp_path / "model")
    edit_config(model, **{CONFIG_KEY: {"version": 1, "keys": None, "values": None, "rotation": "none", "layers": {}}})
    edit_tensors(model, model__layers__0__self_attn__k_scale=torch.tensor([77.0]))
    quantize(model, tmp_path / "out", text_file)
    assert CONFIG_KEY not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert 0 < load_tensors(tmp_path / "out")["model.layers.0.self_attn.k_scale"].item() < 1
