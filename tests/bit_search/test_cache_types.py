"""A search for the types of keys and values: what the recipe promises is what the engine does; refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import quantkit
from quantkit.bit_search import cache_types
from quantkit.bit_search.cache_types import cache_section
from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.bit_search.run import search_cache, search_recipe
from quantkit.bit_search.start import start_recipe
from quantkit.compress.recipe import load
from quantkit.errors import GateFailure, InputError, ModelError, SchemeError
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
        given = {"text": str(text_file), "max_tokens": 400, "device": "cpu", "engine": ENGINE, **changes}
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
        windows = fixed_windows(original, TEXT, max_tokens=800)[part::2][:1]
        assert fidelity(made, original, windows, greedy_tokens=0).mean_kl == pytest.approx(kl, rel=1e-4)
    assert load(str(folder / "mine.yaml")).measured["kl"] == pytest.approx(found.kv_cache.measured_kl, abs=1e-6)


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
    search_cache(str(model), SearchTarget(kv_bits=BITS), options(tmp_path / "x.yaml", max_tokens=64))
    assert seen == [(True, True)]


def test_a_recipe_that_calibrates_its_cache_loses_its_calibration(model, options, tmp_path):
    found = search_cache(
        str(model), SearchTarget(kv_bits=BITS), options(tmp_path / "x.yaml", recipe="kv-fp8", max_tokens=64)
    )
    recipe = load(str(tmp_path / "x.yaml"))
    assert (found.base, recipe.calibration, recipe.gates) == ("kv-fp8", None, load("kv-fp8").gates)


def test_layers_with_a_window_are_left_out(options, tmp_path):
    windowed = make_model(tmp_path / "gemma", "gemma3_text")
    found = search_cache(str(windowed), SearchTarget(kv_bits=8), options(tmp_path / "x.yaml", max_tokens=64))
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
    choice = CacheChoice(bits=4, layers=layers, uniform={}, sum_kl=0, search_kl=0, measured_kl=0)
    assert cache_section(choice) == {
        "dtype": "int4",
        "keys": {"dtype": "int4"},
        "values": {"dtype": "int3"},
        "outliers": "off",
        "layers": [{"numbers": [0, 6], "keys": {"dtype": "int8"}, "values": {"dtype": "int4"}}],
    }
    same = dataclasses.replace(choice, layers=layers[1:3])
    assert "layers" not in cache_section(same)


def test_beside_weights(model, text_file, tmp_path):
    options = SearchOptions(
        recipe=load("rtn-int4", ["weights.group_size=32"]),
        output=tmp_path / "both.yaml",
        candidates=("int4:32", "int8:32"),
        text=str(text_file),
        max_tokens=300,
        rounds=0,
        device="cpu",
        engine=ENGINE,
        checkpoint=tmp_path / "made",
    )
    found = search_recipe(str(model), SearchTarget(bits=6.0, kv_bits=BITS), options)
    assert found.kv_cache.bits <= BITS
    recipe = load(str(tmp_path / "both.yaml"))
    assert recipe.source["kv_cache"]["layers"] if len({(x.keys, x.values) for x in found.kv_cache.layers}) > 1 else True
    llm, original = (load_llm(str(path), device="cpu", **ENGINE) for path in (tmp_path / "made", model))
    stored = [layout.scheme.key.dtype.name for layout in llm.engine.runner.cache.layouts]
    assert stored == [layer.keys for layer in found.kv_cache.layers]
    windows = fixed_windows(original, TEXT, max_tokens=600)[1:2]
    assert fidelity(llm, original, windows, greedy_tokens=0).mean_kl == pytest.approx(found.measured_kl, rel=1e-4)
    assert found.expected_kl > found.kv_cache.measured_kl


def test_what_cannot_be_searched_is_refused(model, options, tmp_path):
    def search(output="x.yaml", bits=4.0, path=model, **changes):
        return search_cache(str(path), SearchTarget(kv_bits=bits), options(tmp_path / output, **changes))

    with pytest.raises(GateFailure, match=r"kv_bits<=1 cannot be reached: the smallest types take [23]\.\d+; raise"):
        search("small.yaml", bits=1.0, max_tokens=64)
    for changes in ({"checkpoint": tmp_path / "made"}, {"candidates": ("int4",)}):
        with pytest.raises(InputError, match="apply to weights; add a target for them, such as --bits"):
            search(**changes)
    with pytest.raises(SchemeError, match="'gguf' cannot describe a KV cache"):
        search(recipe="gguf-q4_k")
    with pytest.raises(ModelError, match="keep a state instead of keys and values"):
        search(path=make_model(tmp_path / "state", "qwen3_next"))
    assert not (tmp_path / "x.yaml").exists()
