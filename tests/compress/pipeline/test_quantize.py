"""The whole way from a model directory to a checkpoint that plain transformers loads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil

import pytest
import torch
from safetensors import safe_open

import quantkit
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline import inputs
from quantkit.compress.pipeline.plan import build_plan
from quantkit.compress.recipe import load, shipped
from quantkit.demo import DEMO_MODEL, DEMO_TEXT, GENERAL_TEXT
from quantkit.formats import REGISTRY as FORMATS
from quantkit.numerics.activation_quant import fake_quantize_inputs
from tests.helpers import edit_config, edit_tensors, load_tensors, make_model, one_of_each, transformers_logits

IDS = torch.arange(2, 62).view(2, 30)


def run(model, recipe, output, text_file=None, **options):
    asked = load(recipe)
    default = asked.scheme.default
    changes = {}
    if default is not None and default.weight.group_size is not None and default.weight.dtype.group is None:
        changes = {"weights.group_size": 32}
        if default.weight.block_rows != 1:
            changes = {"weights.group_size": "32x32", "activations.group_size": 32}
    if asked.calibration is not None:
        changes |= {"calibration.data": str(text_file), "calibration.samples": 8, "calibration.sequence_length": 48}
    options.setdefault("overrides", {})
    return quantkit.quantize(model, recipe, output, **{**options, "overrides": {**changes, **options["overrides"]}})


def decode_linears(model, reader, format_, scheme):
    """Give linears of a model the weights that we decode from a checkpoint, and inputs quantized by their scheme."""
    names = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in names.items():
        linear = scheme.find(name)
        if linear is None:
            continue
        local = {n.removeprefix(f"{name}."): reader.tensor(n) for n in reader.names if n.startswith(f"{name}.")}
        decoded = format_.decode(local, linear)
        # transformers decodes zero points while loading, in the scale's dtype, all else in the dtype asked for.
        asked = torch.float32 if linear.weight.symmetric else decoded.scale.dtype
        module.weight.data = decoded.dequantize(asked).float()
        if linear.activation is not None:
            module.register_forward_pre_hook(
                lambda module, args, scheme=linear.activation, scale=decoded.input_scale: (
                    fake_quantize_inputs(args[0], scheme, scale),
                )
            )


def decoded_logits(source, output):
    """Logits of the source model with every quantized weight replaced by what we decode from the output."""
    from transformers import AutoModelForCausalLM

    reader = CheckpointReader(output)
    format_ = next(f for f in FORMATS.all().values() if f.recognise(reader.config))
    scheme = format_.recognise(reader.config)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    decode_linears(model, reader, format_, scheme)
    for name, parameter in model.named_parameters():
        if name in reader and not name.endswith("proj.weight"):
            parameter.data = reader.tensor(name).float()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def loads_in_float32(name: str) -> bool:
    """transformers decodes microscaling types to bfloat16; see test_number_types."""
    default = load(name).scheme.default
    return default is not None and default.weight.dtype.scale == "float"


@pytest.mark.parametrize("recipe", [name for name in shipped() if loads_in_float32(name)])
def test_every_shipped_recipe_loads_in_transformers(tiny_llama, tmp_path, text_file, recipe):
    changes = {"steps.autoround.iterations": 20} if recipe == "autoround-int4" else {}
    result = run(tiny_llama, recipe, tmp_path / "out", text_file, overrides=changes)
    actual = transformers_logits(tmp_path / "out", IDS)
    torch.testing.assert_close(actual, decoded_logits(tiny_llama, tmp_path / "out"), rtol=0, atol=1e-4)
    assert result.num_quantized == 14
    assert result.output_bytes < result.source_bytes
    original = transformers_logits(tiny_llama, IDS)
    assert 0 < (actual - original).norm() / original.norm() < 0.6


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    one_of_each(["awq-int4", "gptq-int4", "w8a8-int8", "fp8-dynamic"], [torch.bfloat16, torch.float16]),
)
def test_sixteen_bit_models_keep_their_dtype(tmp_path, text_file, dtype, recipe):
    model = make_model(tmp_path / "model", dtype=dtype)
    run(model, recipe, tmp_path / "out", text_file)
    tensors = load_tensors(tmp_path / "out")
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == dtype
    assert tensors["model.norm.weight"].dtype == tensors["model.layers.0.input_layernorm.weight"].dtype == dtype
    torch.testing.assert_close(
        transformers_logits(tmp_path / "out", IDS), decoded_logits(model, tmp_path / "out"), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("recipe", ["rtn-int4", "gptq-int4"])
def test_what_is_measured_is_what_is_written(tiny_llama, tmp_path, text_file, recipe):
    """The dense format writes the values that calibration used: they equal what the codes decode to."""
    run(tiny_llama, recipe, tmp_path / "codes", text_file)
    run(tiny_llama, recipe, tmp_path / "dense", text_file, overrides={"format": "dense"})
    torch.testing.assert_close(
        transformers_logits(tmp_path / "dense", IDS), transformers_logits(tmp_path / "codes", IDS), rtol=0, atol=1e-5
    )


def test_sharded_sources_and_tied_embeddings(tmp_path, text_file):
    whole = make_model(tmp_path / "whole", tie_word_embeddings=True)
    sharded = make_model(tmp_path / "sharded", tie_word_embeddings=True, shards=4)
    for model in (whole, sharded):
        run(model, "awq-int4", tmp_path / f"{model.name}-out", text_file)
    first, second = load_tensors(tmp_path / "whole-out"), load_tensors(tmp_path / "sharded-out")
    assert "lm_head.weight" not in first
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert transformers_logits(tmp_path / "whole-out", IDS).isfinite().all()


def test_runs_repeat_bit_for_bit_in_memory_and_on_disk(tiny_llama, tmp_path, text_file):
    run(tiny_llama, "gptq-int4", tmp_path / "a", text_file)
    run(tiny_llama, "gptq-int4", tmp_path / "b", text_file, activations="disk")
    run(tiny_llama, "gptq-int4", tmp_path / "c", text_file, resume=False)
    shards = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(shards) == 3
    for name in shards:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_overrides_reach_the_layers_they_name(tiny_llama, tmp_path):
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        """
name: mixed
description: Four bits, eight in the first layer, and o_proj ignored.
weights: {dtype: int4, group_size: 32}
ignore: ["*.o_proj"]
overrides:
  - modules: "model.layers.0.mlp.*"
    weights: {dtype: int8, group_size: channel}
format: compressed-tensors
"""
    )
    result = quantkit.quantize(tiny_llama, recipe, tmp_path / "out")
    by_name = {f"{layer.name}.{linear.name}": linear.scheme for layer in result.layers for linear in layer.linears}
    assert by_name["model.layers.0.mlp.up_proj"] == "int8 channel"
    assert by_name["model.layers.1.mlp.up_proj"] == by_name["model.layers.0.self_attn.q_proj"] == "int4 g32"
    assert "model.layers.0.self_attn.o_proj" in result.ignored
    assert "model.layers.1.self_attn.o_proj.weight" in load_tensors(tmp_path / "out")
    torch.testing.assert_close(
        transformers_logits(tmp_path / "out", IDS), decoded_logits(tiny_llama, tmp_path / "out"), rtol=0, atol=1e-4
    )


def test_the_manifest_says_how_it_was_made(tiny_llama, tmp_path, text_file):
    result = run(tiny_llama, "gptq-int4", tmp_path / "out", text_file)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["recipe"]["weights"]["group_size"] == 32
    assert manifest["identity"]["versions"]["torch"] == importlib.metadata.version("torch")  # torch adds "+cu130"
    assert len(manifest["identity"]["source"]["model.safetensors"]) == 64
    assert manifest["result"]["bits_per_weight"] == result.bits_per_weight == 4 + 32 / 32
    shards = {path.name: path for path in (tmp_path / "out").glob("*.safetensors")}
    assert manifest["files"] == {
        name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in shards.items()
    }
    timings = json.loads((tmp_path / "out" / "quantkit-run.json").read_text())
    assert timings["layers"][1]["seconds"]["gptq"] > 0
    assert timings["peak_bytes"] > 0
    for layer in result.layers:
        assert layer.output_snr_db > 10
        assert all(linear.error < linear.rounding_error for linear in layer.linears)


@pytest.mark.parametrize("dtype", ["int2", "int3", "int4", "int8"])
@pytest.mark.parametrize("group_size", [32, "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_integer_scheme_loads(tiny_llama, tmp_path, dtype, group_size, symmetric):
    changes = {"weights.dtype": dtype, "weights.group_size": group_size, "weights.symmetric": symmetric}
    run(tiny_llama, "rtn-int8", tmp_path / "out", overrides=changes)
    torch.testing.assert_close(
        transformers_logits(tmp_path / "out", IDS), decoded_logits(tiny_llama, tmp_path / "out"), rtol=0, atol=1e-4
    )


def test_mixed_source_dtypes_lose_nothing(tmp_path, text_file):
    """Norms in bfloat16, linears in float32: what is ignored comes out bit for bit."""
    model = make_model(tmp_path / "model")
    norms = {n: t.bfloat16() for n, t in load_tensors(model).items() if "norm" in n}
    edit_tensors(model, **{name.replace(".", "__"): value for name, value in norms.items()})
    run(model, "gptq-int4", tmp_path / "out", text_file, overrides={"ignore": ["*.o_proj"]})
    before, after = load_tensors(model), load_tensors(tmp_path / "out")
    for name in [n for n in after if "norm" in n or "o_proj" in n or "embed" in n or "head" in n]:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name


def test_sixteen_bit_norms_are_calibrated_as_they_are_written(tmp_path, text_file):
    """float16 is computed in float32 here; folded norms must already carry their final rounding."""
    model = make_model(tmp_path / "model", dtype=torch.float16)
    seen = {}
    from quantkit.compress.pipeline import layers as pipeline_layers

    original = pipeline_layers.write_layer

    def spy(plan, index, layer, folder):
        seen.update({f"{layer.name}.{n}": p.clone() for n, p in layer.block.named_parameters() if "norm" in n})
        return original(plan, index, layer, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_layers, "write_layer", spy)
        run(model, "awq-int4", tmp_path / "out", text_file)
    tensors = load_tensors(tmp_path / "out")
    assert len(seen) == 4
    assert all(torch.equal(value.float(), tensors[name].float()) for name, value in seen.items())


def test_steps_in_any_order_use_their_own_ranges(tiny_llama, tmp_path, text_file):
    """A fold after a range search must not leave ranges behind that belong to other values."""
    errors = {}
    for steps in ([{"awq": {}}, {"smoothquant": {}}], [{"smoothquant": {}}, {"awq": {}}]):
        changes = {"steps": steps, "weights.dtype": "int8", "weights.group_size": "channel", "weights.symmetric": True}
        name = "-".join(next(iter(step)) for step in steps)
        result = run(tiny_llama, "awq-int4", tmp_path / name, text_file, overrides=changes)
        errors[name] = min(layer.output_snr_db for layer in result.layers)
    assert errors["awq-smoothquant"] > errors["smoothquant-awq"] - 6


def test_source_extras_are_carried_over(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "LICENSE").write_text("terms")
    edit_config(model, custom_note="kept")
    run(model, "rtn-int8", tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "terms"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["custom_note"] == "kept"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    names = set()
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == names


def test_recipes_without_steps_need_no_tokenizer(tmp_path):
    model = make_model(tmp_path / "model")
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert run(model, "rtn-int4", tmp_path / "out").warnings == ()


def test_a_copy_of_the_demo_model_is_calibrated_on_its_own_text(tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(inputs, "load_samples", lambda text, *_, **__: texts.append(text) or inputs.NO_TEXT)
    copy, other = (shutil.copytree(DEMO_MODEL, tmp_path / name) for name in ("copy", "other"))
    with (other / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write(" ")
    for model in (DEMO_MODEL, copy, other):
        inputs.read_samples(build_plan(str(model), load("gptq-int4"), tmp_path / "out", "cpu"))
    assert texts == [DEMO_TEXT, DEMO_TEXT, GENERAL_TEXT]


def test_the_listener_hears_everything(tiny_llama, tmp_path, text_file):
    heard = []

    class Listener:
        def __getattr__(self, name):
            return lambda *args: heard.append((name, args))

    run(tiny_llama, "gptq-int4", tmp_path / "out", text_file, listener=Listener())
    kinds = [name for name, _ in heard if name != "warning"]
    assert kinds[0] == "plan"
    assert kinds.count("layer_started") == kinds.count("layer_finished") == 2
    assert [args[0] for name, args in heard if name == "phase"][:6] == [
        "load",
        "gptq",
        "round",
        "errors",
        "write",
        "advance",
    ]
    assert any("16,000 or more" in args[0] or "noisier" in args[0] for name, args in heard if name == "warning")
