"""Which KV cache runs: the checkpoint's own, those of other tools, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit import LLM, SamplingParams
from quantkit.benchmark.memory_prediction import predict
from quantkit.checkpoints.kv_cache_entries import CONFIG_KEY, VERSION, read_cache_schemes
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, SchemeError
from quantkit.evaluate.loading import load_llm
from quantkit.kernels.layouts import page_bytes, residual_bytes
from quantkit.models.families import find
from quantkit.numerics.kv_cache import INT8_TOKEN, scheme_to_dict
from quantkit.numerics.scheme import KVScheme
from quantkit.planning import estimate
from quantkit.planning.memory import kv_allocated_bytes
from quantkit.runtime.model.cache_schemes import follows_checkpoint, read_stored_cache
from quantkit.runtime.model.config import read_config
from tests.helpers import edit_config, make_model

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
PLAIN = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}


@pytest.fixture(scope="module")
def made(tmp_path_factory, text_file):
    """A function that gives the model compressed with a KV cache; the same each time."""
    folder, model = tmp_path_factory.mktemp("caches"), make_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")

    def quantized(name, **section):
        if not (folder / name).exists():
            changes = {f"kv_cache.{key}": value for key, value in section.items()}
            sizes = {"calibration.data": str(text_file), "calibration.samples": 4, "calibration.sequence_length": 48}
            quantkit.quantize(str(model), "kv-fp8", folder / name, overrides={**changes, **sizes})
        return folder / name

    return quantized


def run(path, kv_cache="auto"):
    return LLM(path, dtype="float32", kv_cache=kv_cache, threads=1, max_length=128, max_sequences=2)


def kept(llm):
    return [layout.scheme.describe() for layout in llm.engine.runner.cache.layouts]


def third_party(folder, tensors=(), config=PLAIN, family="llama", **changes):
    """A checkpoint as another tool writes it: more tensors, and what config.json says."""
    path = make_model(folder / "model", family, **changes)
    stored = load_file(path / "model.safetensors")
    save_file({**stored, **dict(tensors)}, path / "model.safetensors", {"format": "pt"})
    if config is not None:
        edit_config(path, quantization_config=config)
    return path


def by_layer(*names, count=2, **values):
    return {
        f"model.layers.{index}.self_attn.{name}": torch.tensor(0.01 * (index + 1) * (1 + side))
        for index in range(count)
        for side, name in enumerate(names)
    }


CACHES = {
    "fp8": {},
    "head": {"granularity": "head"},
    "int8": {"dtype": "int8", "granularity": "token"},
    "int4": {"dtype": "int4", "granularity": None},
    "mixed": {"dtype": "int4", "granularity": None, "values": {"dtype": "int8"}},
    "k4v2": {"dtype": "int4", "granularity": None, "values": {"dtype": "int2"}},
    "k3v2": {"dtype": "int3", "granularity": None, "values": {"dtype": "int2"}},
    "rotated": {"dtype": "int4", "granularity": "token", "rotation": "hadamard"},
    "differing": {"dtype": "int4", "granularity": None, "layers": [{"numbers": [1], "keys": {"dtype": "int8"}}]},
}
SHOWN = {"mixed": "int4", "rotated": "int4", "head": "fp8", "differing": "int4 and others"}


@pytest.mark.parametrize("name", CACHES)
def test_auto_follows_the_checkpoint(made, name):
    path = made(name, **CACHES[name])
    llm = run(path)
    config = json.loads((path / "quantkit.json").read_text())["result"]["layers"]
    for layout, record in zip(llm.engine.runner.cache.layouts, config, strict=True):
        scheme = record["kv_cache"]["scheme"]
        for side, ours in (("keys", layout.scheme.key), ("values", layout.scheme.value)):
            assert (scheme[side]["dtype"], scheme[side]["granularity"]) == (ours.dtype.name, ours.granularity)
        assert scheme["rotation"] == layout.scheme.rotation
        for side, scale in (("key_scale", layout.cache.key_scale), ("value_scale", layout.cache.value_scale)):
            assert (list(scale) if isinstance(scale, tuple) else [scale]) == (record["kv_cache"][side] or [1.0])
    assert llm.kv_type == SHOWN.get(name, name)
    assert kept(run(path, "fp32")) == ["keys unquantized, values unquantized"] * 2


@pytest.mark.parametrize("name", CACHES)
def test_what_is_planned_is_what_is_allocated(made, name):
    path = made(name, **CACHES[name])
    layouts = run(path).engine.runner.cache.layouts
    predicted = predict(path, dtype="float32")
    assert (predicted.page_bytes, predicted.residual_bytes) == (page_bytes(layouts), residual_bytes(layouts, 1))
    plan = estimate(path)
    assert plan.caches[1].form.name == "checkpoint"
    assert kv_allocated_bytes(plan.shape, 200, plan.caches[1].form) == 4 * page_bytes(layouts) + residual_bytes(
        layouts, 1
    )
    assert estimate(path, kv_cache="auto").caches[0] == plan.caches[1]


def test_a_plan_counts_what_layers_keep_each(made, tmp_path):
    """Layer 1 with keys in the model's dtype, as a remedy for outliers; and a recipe's own form comes first."""
    path = shutil.copytree(made("int4", **CACHES["int4"]), tmp_path / "mixed")
    entry = json.loads((path / "config.json").read_text())["quantkit_kv_cache"]
    other = {**scheme_to_dict(KVScheme(value=INT8_TOKEN))}
    edit_config(path, quantkit_kv_cache={**entry, "layers": {"1": other}})
    llm, plan = run(path), estimate(path)
    layouts = llm.engine.runner.cache.layouts
    assert kept(llm)[1] == "keys unquantized, values int8 per token"
    assert kv_allocated_bytes(plan.shape, 64, plan.caches[1].form) == page_bytes(layouts) + residual_bytes(layouts, 1)
    assert llm.stats()["kv_bytes"] == 2 * residual_bytes(layouts, 1) + page_bytes(layouts) * llm.stats()["kv_pages"]
    asked = estimate(None, recipe="awq-int4-kv8").caches
    assert [row.form.name for row in asked][:2] == ["bf16", "recipe"]
    assert asked[1].per_sequence == asked[3].per_sequence


def test_fp8_by_name_takes_the_scales_that_are_there(made):
    for name, granularity in (("fp8", "tensor"), ("head", "head")):
        followed, named = run(made(name, **CACHES[name])), run(made(name, **CACHES[name]), "fp8")
        assert kept(followed) == kept(named) == [f"keys fp8 per {granularity}, values fp8 per {granularity}"] * 2
        scales = [[layout.cache.key_scale for layout in llm.engine.runner.cache.layouts] for llm in (followed, named)]
        assert scales[0] == scales[1] != [1.0, 1.0]
    plain = run(made("int8", **CACHES["int8"]), "fp8")
    assert [layout.cache.key_scale for layout in plain.engine.runner.cache.layouts] == [1.0, 1.0]


def test_evaluation_reads_through_the_cache(made):
    """Pages of serving and one token at a time, where the checkpoint quantizes its cache."""
    asked = {"dtype": "float32", "threads": 1, "max_length": 64}
    assert load_llm(str(made("int4", **CACHES["int4"])), **asked).engine.config.page_size == 64
    assert load_llm(str(made("int4", **CACHES["int4"])), kv_cache="fp32", **asked).engine.config.page_size == 16


NAMES = {
    "compressed-tensors": (("k_scale", "v_scale"), {**PLAIN, "kv_cache_scheme": SCHEME}),
    "modelopt names": (("k_proj.k_scale", "v_proj.v_scale"), {**PLAIN, "kv_cache_scheme": SCHEME}),
    "old names": (("k_proj.output_scale", "v_proj.output_scale"), {**PLAIN, "kv_cache_scheme": SCHEME}),
    "one scale": (("kv_scale",), {**PLAIN, "kv_cache_scheme": SCHEME}),
}


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_other_tools(tmp_path, name):
    names, config = NAMES[name]
    llm = run(third_party(tmp_path, by_layer(*names), config))
    layouts = llm.engine.runner.cache.layouts
    assert kept(llm) == ["keys fp8 per tensor, values fp8 per tensor"] * 2
    assert [layout.cache.key_scale for layout in layouts] == pytest.approx([0.01, 0.02])
    values = [0.02, 0.04] if len(names) == 2 else [0.01, 0.02]
    assert [layout.cache.value_scale for layout in layouts] == pytest.approx(values)
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].token_ids) > 0


BROKEN = {
    "missing": ({}, "config.json says that KV cache scales are stored, but model.layers.0.self_attn.k_scale"),
    "one side": (by_layer("k_scale"), "has KV cache scales for only its keys or only its values"),
    "zero": ({**by_layer("k_scale", "v_scale"), "model.layers.1.self_attn.v_scale": torch.zeros(1)}, "v_scale is 0"),
    "nan": (
        {**by_layer("k_scale", "v_scale"), "model.layers.0.self_attn.k_scale": torch.tensor(float("nan"))},
        "k_scale is nan, but a scale of the KV cache must be positive",
    ),
    "heads": (
        {**by_layer("k_scale", "v_scale"), "model.layers.0.self_attn.k_scale": torch.ones(3)},
        "k_scale has 3 values; expected 1, or one per head",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_scale_is_ever_made_up(tmp_path, name):
    tensors, message = BROKEN[name]
    path = third_party(tmp_path, tensors, {**PLAIN, "kv_cache_scheme": SCHEME})
    with pytest.raises(CheckpointError, match=message):
        run(path)


def test_windows_are_ignored_and_need_no_scale(tmp_path):
    tensors = by_layer("k_scale", "v_scale", count=6)
    kept_layers = {name: value for name, value in tensors.items() if ".0." not in name}
    config = {**PLAIN, "kv_cache_scheme": SCHEME}
    llm = run(third_party(tmp_path, kept_layers, config, family="gemma3_text"))
    quantized = [layout.scheme.is_quantized for layout in llm.engine.runner.cache.layouts]
    assert quantized == [window is None for window in llm.model.config.windows]
    assert any(quantized)
    assert not quantized[0]


def test_what_is_not_known_is_said_and_not_followed(tmp_path):
    other = {**SCHEME, "num_bits": 8, "type": "int"}
    path = third_party(tmp_path, by_layer("k_scale", "v_scale"), {**PLAIN, "kv_cache_scheme": other})
    reader = CheckpointReader(path)
    actual = read_stored_cache(reader, read_config(reader.config, find(reader.config)))
    assert actual.schemes is None
    assert "kv_cache_scheme with 8-bit int" in actual.note
    assert kept(run(path)) == ["keys unquantized, values unquantized"] * 2
    edit_config(path, quantkit_kv_cache={"version": 9})
    assert "version 9" in read_stored_cache(CheckpointReader(path), run(path).model.config).note


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_planned_size_on_disk_is_that_of_the_file(made, tmp_path, granularity):
    path = made("fp8" if granularity == "tensor" else "head", **({} if granularity == "tensor" else CACHES["head"]))
    written = json.loads((path / "quantkit-run.json").read_text())
    plan = estimate(written["model"], recipe="kv-fp8", overrides={"kv_cache.granularity": granularity})
    assert plan.weights[-1].size.disk_bytes == written["output_bytes"]


def test_the_summary_says_which_layers_differ(made):
    from quantkit.results import LayerRecord
    from quantkit.results.compression import describe_caches

    layers = json.loads((made("int4", **CACHES["int4"]) / "quantkit.json").read_text())["result"]["layers"]
    records = [LayerRecord.from_dict(layer) for layer in layers]
    assert describe_caches(records) == "keys int4 per channel, values int4 per token"
    layers[1]["kv_cache"]["scheme"]["keys"] = None
    records = [LayerRecord.from_dict(layer) for layer in [*layers, layers[0]]]
    assert describe_caches(records).endswith("; layer 1: keys unquantized, values int4 per token")
    records = [LayerRecord.from_dict(layer) for layer in [*layers, {**layers[1], "index": 2}, *[layers[0]] * 3]]
    assert "; layers 1, 2: keys unquantized" in describe_caches(records)
    assert describe_caches([]) is None


def test_what_transformers_runs_says_that_the_cache_is_not_followed(made):
    llm = LLM(made("int4", **CACHES["int4"]), backend="transformers", dtype="float32", threads=1)
    assert "transformers runs this model and keeps keys and values unquantized" in llm.describe()["notes"]
    assert llm.kv_type == "auto"


def own_entry(**changes):
    return {CONFIG_KEY: {"version": VERSION, **scheme_to_dict(KVScheme()), "layers": {}, **changes}}


@pytest.mark.parametrize(
    "config",
    [
        own_entry(layers={"9" * 5000: {}}),
        own_entry(layers={"4": {}}),
        own_entry(layers={"0": float("inf")}),
        {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": ["x"]}}},
    ],
)
def test_what_says_nothing_of_a_cache_is_refused(config):
    with pytest.raises(SchemeError, match=r"names layer|the KV cache of a layer is inf|strategy .* is not supported"):
        read_cache_schemes(config, 4)


def test_a_cache_of_too_many_layers_is_not_announced(tmp_path):
    config = {"num_hidden_layers": 1 << 60, "quantization_config": {"kv_cache_scheme": "static"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not follows_checkpoint(tmp_path)
