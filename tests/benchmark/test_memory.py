"""Predicted bytes equal those of the tensors that are there; what is counted is what exists."""

from __future__ import annotations

import pytest
import torch

from quantkit.benchmark.memory import (
    observed_activation_bytes,
    observed_cache_bytes,
    observed_weight_bytes,
    process_bytes,
)
from quantkit.benchmark.memory_prediction import max_length, predict
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.run import find_ceilings, load_target, measure_targets
from quantkit.demo import DEMO_MODEL
from quantkit.kernels import cpu
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.loader import load_model
from tests.compress.pipeline.test_quantize import run
from tests.helpers import make_model
from tests.runtime.mtp_models import make_mtp_model

CPU = torch.device("cpu")


def check_weights(folder, **options):
    model = load_model(folder, **options)
    prediction = predict(folder, **options)
    assert prediction.weight_bytes == observed_weight_bytes(model) == model.num_bytes
    return prediction


FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama odd sizes": {"vocab_size": 301, "intermediate_size": 100},
    "qwen2": {},  # biases of q, k and v
    "qwen3": {},  # norms of queries and keys
    "mistral": {},
    "gpt_neox": {},  # layer norms, one fused projection, no gate
    "phi3": {"pad_token_id": 0},  # gate and up stored as one
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "apertus": {},  # an activation with parameters
    "deepseek_v3": {},  # latent attention, a router in float32
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_families(tmp_path, name, dtype):
    folder = make_model(tmp_path, name.split()[0], dtype=dtype, **FAMILIES[name])
    check_weights(folder)


@pytest.mark.parametrize("head", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_with_a_rounded_head(tmp_path, head, tied):
    check_weights(make_model(tmp_path, tie_word_embeddings=tied, dtype=torch.bfloat16), head_dtype=head)


def test_weights_in_another_dtype(tmp_path):
    folder = make_model(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True)
    check_weights(folder, dtype="float32")
    check_weights(folder, dtype="bfloat16")


@pytest.mark.parametrize("recipe", ["rtn-int4", "awq-int4", "rtn-int8", "w8a8-int8", "fp8-dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_recipes(tmp_path, text_file, recipe, dtype):
    source = make_model(tmp_path / "source", dtype=dtype)
    run(source, recipe, tmp_path / "out", text_file)
    check_weights(tmp_path / "out")


def test_weights_without_compiled_kernels(tmp_path, text_file, monkeypatch):
    source = make_model(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True)
    run(source, "rtn-int4", tmp_path / "out", text_file)
    monkeypatch.setattr(cpu, "library", lambda: None)
    for folder in (source, tmp_path / "out"):
        prediction = check_weights(folder)
        assert not prediction.native


def test_of_the_demo_model():
    prediction = check_weights(DEMO_MODEL, dtype="bfloat16")
    assert prediction.page_bytes == 4 * 2 * 4 * 64 * 64 * 2  # layers, keys and values, heads, tokens, channels, bytes
    assert max_length(None) == 1024


@pytest.mark.parametrize("kv_cache", ["auto", "bf16", "fp8", "int8", "int4", "k3v2"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_cache(family_models, family, kv_cache):
    prediction = predict(family_models[family], kv_cache=kv_cache, page_size=32)
    model = load_model(family_models[family])
    layouts = model.layouts(kv_cache, 32)
    cache = KVCache(layouts, 5, 3, CPU)
    assert (
        observed_cache_bytes(cache)
        == 5 * prediction.page_bytes + 3 * prediction.residual_bytes
        == cache.num_bytes + cache.residual_bytes
    )


def test_an_mtp_head_is_predicted_too(tmp_path):
    folder = make_mtp_model(tmp_path, "glm4_moe", own_tables=True)
    options = BenchmarkOptions(concurrencies=(1,), prompt_tokens=20, new_tokens=3, num_requests=2)
    target = load_target(folder, options, {"num_pages": 8, "threads": 1, "speculate": "mtp"})
    assert target.prediction.weight_bytes == target.llm.model.num_bytes > predict(folder).weight_bytes
    assert 8 * target.prediction.page_bytes == observed_cache_bytes(target.llm.engine.runner.cache)
    assert len(target.cost.layers) == 2


def test_a_model_that_only_transformers_runs_has_no_prediction(tmp_path):
    assert predict(make_model(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4)) is None
    assert max_length(tmp_path) is None


@pytest.mark.parametrize("kv_cache", ["auto", "int4"])
@pytest.mark.parametrize("which", ["demo", "tiny"])
def test_the_whole_record(tiny_llama, which, kv_cache, quick_ceilings):
    options = BenchmarkOptions(concurrencies=(1, 2), prompt_tokens=100, new_tokens=3, num_requests=2)
    # A pool of a few pages, so that the peak is not the pool alone.
    engine = {"kv_cache": kv_cache, "num_pages": 8, "threads": 1}
    target = load_target(None if which == "demo" else tiny_llama, options, engine)
    (result,) = measure_targets([target], options, find_ceilings([target]))
    parts = {record.part: record for record in result.memory}
    for part in ("weights", "kv pool", *(["kv residuals"] if kv_cache == "int4" else [])):
        assert parts[part].predicted_bytes == parts[part].observed_bytes > 0
    assert ("kv residuals" in parts) == (kv_cache == "int4")
    assert parts["peak"].predicted_bytes == pytest.approx(parts["peak"].observed_bytes, rel=0.1)
    exact = sum(parts[part].observed_bytes for part in parts if part not in ("peak", "process"))
    assert parts["peak"].observed_bytes == exact
    assert parts["activations"].observed_bytes > 1000
    assert parts["process"].observed_bytes > parts["weights"].observed_bytes
    assert result.capacity_tokens == 8 * 64
    assert "512 tokens of capacity" in parts["kv pool"].note


def test_what_work_holds_is_what_it_made():
    kept = torch.zeros(1000)

    def work():
        first = kept + 1  # 4,000 bytes
        second = first.view(10, 100)[2:]  # of the same storage
        third = second.double()  # 800 numbers of 8 bytes
        del first, second
        kept.add_(third[0, 0])  # what was there before does not count

    assert observed_activation_bytes(work, CPU) == 4000 + 800 * 8


def test_what_is_freed_makes_room():
    def work():
        for _ in range(5):
            torch.empty(1000)

    assert observed_activation_bytes(work, CPU) == 4000


def test_the_process_is_larger_than_what_it_just_took():
    before = process_bytes(CPU)
    block = torch.ones(30_000_000)
    assert process_bytes(CPU) - before > 0.9 * block.nbytes
