"""A search for the types of keys and values: what the recipe promises is what the engine does; refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import quantkit
from quantkit.bit_search import cache_types, run, sensitivities
from quantkit.bit_search.cache_run import search_cache
from quantkit.bit_search.cache_types import cache_section
from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.bit_search.run import search_recipe
from quantkit.bit_search.setup import start_recipe
from quantkit.compress.recipe import load
from quantkit.errors import DataError, GateFailure, InputError, ModelError, SchemeError
from quantkit.evaluate.fidelity import fidelity, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.kernels.layouts import page_bytes
from quantkit.results import CacheChoice, CacheLayerChoice, CacheSearchResult
from tests.helpers import TEXT, make_model

ENGINE = {"dtype": "float32", "threads": 1}
BITS = 4.5


@pytest.fixture(scope="module")
def options(text_file):
    def build(output, recipe=None, **changes):
        start = start_recipe(recipe, cache_only=True)
        given = {"text": str(text_file), "max_tokens": 600, "device": "cpu", "engine": ENGINE, **changes}
        return SearchOptions(recipe=start, output=output, **given)

    return build


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama", hidden_size=128)


@pytest.fixture(scope="module")
def searched(model, options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    found = search_cache(str(model), SearchTarget(kv_bits=BITS), options(folder / "mine.yaml", work=folder / "work"))
    return found, folder


@pytest.fixture(scope="module")
def made(searched, model):
    _, folder = searched
    quantkit.quantize(model, folder / "mine.yaml", folder / "made", device="cpu")
    return load_llm(str(folder / "made"), device="cpu", **ENGINE)


def test_the_engine_stores_what_was_chosen_in_the_bits_that_were_promised(searched, made):
    found, _ = searched
    layouts = made.engine.runner.cache.layouts
    stored = [(layout.scheme.key.dtype.name, layout.scheme.value.dtype.name) for layout in layouts]
    assert stored == [(layer.keys, layer.values) for layer in found.kv_cache.layers]
    page = layouts[0].page_size
    numbers = sum(2 * page * layout.num_heads * layout.head_dim for layout in layouts)
    assert 8 * page_bytes(layouts) / numbers == pytest.approx(found.kv_cache.bits, rel=1e-6)
    assert found.kv_cache.bits <= BITS


def test_the_kl_is_that_of_the_checkpoint_while_decoding(searched, made, model):
    found, folder = searched
    original = load_llm(str(model), device="cpu", **ENGINE)
    for part, kl in ((0, found.kv_cache.search_kl), (1, found.kv_cache.measured_kl)):
        windows = fixed_windows(original, TEXT, max_tokens=1200)[part::2][:2]
        assert found.kv_cache.num_tokens == sum(map(len, windows)) > 400
        assert fidelity(made, original, windows, greedy_tokens=0).mean_kl == pytest.approx(kl, rel=1e-4)
    measured = load(str(folder / "mine.yaml")).measured
    assert (measured["kl"], measured["tokens"]) == (round(found.kv_cache.measured_kl, 6), sum(map(len, windows)))


def test_no_cache_of_the_same_types_that_fits_is_better(searched):
    choice = searched[0].kv_cache
    assert len(choice.uniform) == 2
    assert choice.search_kl <= min(choice.uniform.values())
    assert choice.sum_kl == pytest.approx(sum(layer.key_kl + layer.value_kl for layer in choice.layers))


def test_a_second_search_measures_only_the_new_choice(searched, model, options, monkeypatch):
    found, folder = searched
    measured = []
    original = cache_types.CacheSearch._measure
    monkeypatch.setattr(cache_types.CacheSearch, "_measure", lambda *given: measured.append(given) or original(*given))
    again = search_cache(str(model), SearchTarget(kv_bits=8.0), options(folder / "again.yaml", work=folder / "work"))
    assert again.kv_cache.search_kl < found.kv_cache.search_kl
    assert len(measured) <= 4  # the choice, two caches of one type, and the choice on other text
    assert CacheSearchResult.from_dict(json.loads(json.dumps(again.to_dict()))) == again


def test_the_cache_of_the_source_is_not_its_own_reference(searched, made, model, options, tmp_path):
    """`made` has the model's weights, and a cache of few bits of its own."""
    of = {
        name: search_cache(str(path), SearchTarget(kv_bits=8.6), options(tmp_path / f"{name}.yaml"))
        for name, path in (("dense", model), ("made", searched[1] / "made"))
    }
    assert {layer.keys for layer in of["made"].kv_cache.layers} == {"int8"}
    assert of["made"].kv_cache.search_kl == pytest.approx(of["dense"].kv_cache.search_kl, rel=1e-4)


def test_a_short_text_is_measured_twice_with_a_note(model, options, tmp_path):
    (tmp_path / "short.txt").write_text(TEXT[:290])
    asked = options(tmp_path / "x.yaml", text=str(tmp_path / "short.txt"))
    found = search_cache(str(model), SearchTarget(kv_bits=BITS), asked)
    assert found.kv_cache.measured_kl == pytest.approx(found.kv_cache.search_kl)
    assert "too short to hold tokens out" in found.notes[-1]


def test_the_model_is_as_before(model, options, tmp_path, monkeypatch):
    seen = []
    original = cache_types.CacheSearch.find

    def find(self, bits):
        llm, ids = self._original, [list(range(5, 40))]
        before = llm.score(ids)[0], llm.engine, llm.model.stored_cache
        result = original(self, bits)
        seen.append((torch.equal(llm.score(ids)[0], before[0]), (llm.engine, llm.model.stored_cache) == before[1:]))
        return result

    monkeypatch.setattr(cache_types.CacheSearch, "find", find)
    search_cache(str(model), SearchTarget(kv_bits=BITS), options(tmp_path / "x.yaml", max_tokens=80))
    assert seen == [(True, True)]


def test_only_the_cache_of_the_recipe_changes(model, options, tmp_path):
    """Also of one that calibrated its cache, and of one with weights of its own."""
    start = {
        "weights": {"dtype": "int4", "group_size": 32},
        "overrides": [
            {"modules": "*o_proj", "weights": {"dtype": "int8", "symmetric": False}},
            {"modules": "*gate_proj", "skip": True},
        ],
        "kv_cache": {"dtype": "fp8"},
        "gates": ["kl<=0.1"],
    }
    (tmp_path / "start.yaml").write_text(json.dumps(start))
    for name in ("kv-fp8", str(tmp_path / "start.yaml")):
        base = load(name)
        asked = options(tmp_path / "x.yaml", recipe=name, max_tokens=80, overwrite=True, resume=False)
        found = search_cache(str(model), SearchTarget(kv_bits=BITS), asked)
        recipe = load(str(tmp_path / "x.yaml"))
        assert (found.base, recipe.gates, recipe.scheme) == (base.name, base.gates, base.scheme)
        assert recipe.calibration is None
        assert (recipe.measured is None) == ("weights" in base.source)  # it would be the KL of the cache alone


def test_layers_with_a_window_are_left_out(options, tmp_path):
    windowed = make_model(tmp_path / "gemma", "gemma3_text")
    found = search_cache(str(windowed), SearchTarget(kv_bits=8), options(tmp_path / "x.yaml", max_tokens=80))
    layouts = load_llm(str(windowed), device="cpu", **ENGINE).engine.runner.cache.layouts
    full = [index for index, layout in enumerate(layouts) if not layout.is_windowed]
    assert 0 < len(full) < len(layouts)
    assert [layer.layer for layer in found.kv_cache.layers] == full


def test_the_section_groups_layers_of_the_same_types():
    pairs = [("int8", "int4"), ("int4", "int3"), ("int4", "int3"), ("int8", "int4"), ("int4", "int3")]
    layers = tuple(
        CacheLayerChoice(layer=2 * n, keys=key, values=value, key_kl=0.0, value_kl=0.0)
        for n, (key, value) in enumerate(pairs)
    )
    choice = CacheChoice(bits=4, layers=layers, uniform={}, num_tokens=1, sum_kl=0, search_kl=0, measured_kl=0)
    assert cache_section(choice) == {
        "dtype": "int4",
        "keys": {"dtype": "int4"},
        "values": {"dtype": "int3"},
        "outliers": "off",
        "layers": [{"numbers": [0, 6], "keys": {"dtype": "int8"}, "values": {"dtype": "int4"}}],
    }
    same = dataclasses.replace(choice, layers=layers[1:3])
    assert "layers" not in cache_section(same)


@pytest.fixture
def with_weights(text_file, tmp_path):
    """Options of a search for weights and a cache."""

    def build(**changes):
        given = {"output": tmp_path / "both.yaml", "text": str(text_file), "device": "cpu", "engine": ENGINE, **changes}
        recipe = load("rtn-int4", ["weights.group_size=32"])
        return SearchOptions(recipe=recipe, candidates=("int4:32", "int8:32"), **given)

    return build


def test_beside_weights(model, with_weights, tmp_path):
    options = with_weights(max_tokens=300, rounds=0, checkpoint=tmp_path / "made")
    found = search_recipe(str(model), SearchTarget(bits=6.0, kv_bits=BITS), options)
    assert found.kv_cache.bits <= BITS
    recipe = load(str(tmp_path / "both.yaml"))
    assert (found.target, recipe.gates) == ("bits<=6, kv_bits<=4.5", load("rtn-int4").gates)
    for layer in found.kv_cache.layers:
        scheme = recipe.kv_cache.of_layer(layer.layer).scheme
        assert (scheme.key.dtype.name, scheme.value.dtype.name) == (layer.keys, layer.values)
    llm, original = (load_llm(str(path), device="cpu", **ENGINE) for path in (tmp_path / "made", model))
    stored = [layout.scheme.key.dtype.name for layout in llm.engine.runner.cache.layouts]
    assert stored == [layer.keys for layer in found.kv_cache.layers]
    windows = fixed_windows(original, TEXT, max_tokens=600)[1:2]
    assert fidelity(llm, original, windows, greedy_tokens=0).mean_kl == pytest.approx(found.measured_kl, rel=1e-4)
    assert found.expected_kl == pytest.approx(found.measured_kl, rel=0.05)  # rounding alone needs no calibration


def test_the_kl_of_the_cache_counts_in_a_target_of_kl(model, with_weights, tmp_path, monkeypatch):
    options = with_weights(max_tokens=80, work=tmp_path / "work")
    compressed = []
    original = sensitivities.quantize_together
    monkeypatch.setattr(sensitivities, "quantize_together", lambda *a, **k: compressed.append(a) or original(*a, **k))
    with pytest.raises(GateFailure, match=r"cannot be reached: the KV cache alone has a KL of 0\.\d+; raise --kl or"):
        search_recipe(str(model), SearchTarget(kl=1e-6, kv_bits=BITS), options)
    assert not compressed
    found = search_recipe(str(model), SearchTarget(kl=0.1, kv_bits=BITS), options)
    assert (found.reached, load(str(tmp_path / "both.yaml")).gates) == (True, ("kl<=0.1",))
    assert found.kv_cache.measured_kl < found.measured_kl <= 0.1
    # A recovery for which even the cache alone loses too much is given up before anything is compressed again.
    monkeypatch.setattr(run.Judge, "first_kl", lambda self, *coarse: 1e-6)
    again = dataclasses.replace(options, output=tmp_path / "again.yaml")
    with pytest.raises(GateFailure, match=r"it takes a KL of about 0.00000, but the KV cache alone has 0\.\d+; raise"):
        search_recipe(str(model), SearchTarget(recovery=99.9, kv_bits=BITS), again)


def test_what_cannot_be_searched_is_refused(model, options, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(cache_types.CacheSearch, "_measure", lambda *given: measured.append(given))

    def search(path=model, bits=4.0, **changes):
        return search_cache(str(path), SearchTarget(kv_bits=bits), options(tmp_path / "x.yaml", **changes))

    with pytest.raises(
        GateFailure, match=r"kv_bits<=1 cannot be reached: the smallest types take [23]\.\d+ bits; raise"
    ):
        search(bits=1.0, max_tokens=80)
    (tmp_path / "short.txt").write_text(" ".join(TEXT.split()[:8]))
    with pytest.raises(DataError, match=r"longest window has \d+ tokens, but the cache is quantized in pages of 64"):
        search(text=str(tmp_path / "short.txt"))
    for changes, flag in (
        ({"checkpoint": tmp_path / "made"}, "--checkpoint"),
        ({"candidates": ("int4",)}, "--candidates"),
        ({"on": "ray"}, "--on"),
        ({"rounds": 0}, "--rounds"),
    ):
        with pytest.raises(InputError, match=f"{flag} applies to weights; add a target for weights, such as --bits"):
            search(**changes)
    with pytest.raises(InputError, match="engine: kv_cache cannot be set"):
        search(engine={**ENGINE, "kv_cache": "int8"})
    with pytest.raises(SchemeError, match="'gguf' cannot describe a KV cache"):
        search(recipe="gguf-q4_k")
    with pytest.raises(ModelError, match="keep a state instead of keys and values"):
        search(make_model(tmp_path / "state", "qwen3_next"))
    with pytest.raises(ModelError, match="runs this model through transformers, whose KV cache"):
        search(make_model(tmp_path / "theirs", "gpt2"))
    windows = make_model(tmp_path / "windows", "gemma3_text", layer_types=["sliding_attention"] * 6)
    with pytest.raises(ModelError, match="all layers have a sliding window"):
        search(windows, max_tokens=80)
    assert not measured
    assert not (tmp_path / "x.yaml").exists()
