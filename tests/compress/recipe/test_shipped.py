"""The recipes that come with quantkit: each loads, says what it is, and stores what its name promises."""

from __future__ import annotations

import pytest

from quantkit.compress.recipe import check, load, shipped

MEANING = {
    "autoround-int4": ("int4 g128", ("autoround",)),
    "awq-int4": ("int4 g128 asym", ("awq", "gptq")),
    "awq-int4-kv4": ("int4 g128 asym", ("awq", "gptq")),
    "awq-int4-kv8": ("int4 g128 asym", ("awq", "gptq")),
    "fp8-block": ("fp8 128x128, activations fp8 per token g128", ()),
    "fp8-dynamic": ("fp8 channel, activations fp8 per token", ()),
    "fp8-static": ("fp8 tensor, activations fp8 per tensor", ()),
    "gguf-q2_k": ("q2_k", ("gptq",)),
    "gguf-q3_k": ("q3_k", ("gptq",)),
    "gguf-q4_k": ("q4_k", ("gptq",)),
    "gguf-q5_k": ("q5_k", ("gptq",)),
    "gptq-int4": ("int4 g128", ("gptq",)),
    "gptq-int4-asym": ("int4 g128 asym", ("gptq",)),
    "gptq-int8": ("int8 channel", ("gptq",)),
    "kv-fp8": (None, ()),
    "mxfp4": ("mxfp4 g32", ("gptq",)),
    "nvfp4": ("nvfp4 g16", ("gptq",)),
    "nvfp4-a4": ("nvfp4 g16, activations nvfp4 per token g16", ("gptq",)),
    "rtn-int4": ("int4 g128", ()),
    "rtn-int8": ("int8 channel", ()),
    "w4a8-fp8": ("int4 g128, activations fp8 per token", ("gptq",)),
    "w8a8-int8": ("int8 channel, activations int8 per token", ("smoothquant", "gptq")),
}
CACHES = {
    "awq-int4-kv4": "keys int4 per channel asymmetric, values int4 per token asymmetric",
    "awq-int4-kv8": "keys int8 per channel asymmetric, values int8 per token",
    "kv-fp8": "keys fp8 per tensor, values fp8 per tensor",
}


def test_these_are_shipped():
    assert list(shipped()) == sorted(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_it_stores_and_does_what_its_name_promises(name):
    recipe = load(name)
    weights = recipe.scheme.default
    assert (weights and weights.describe(), tuple(recipe.steps)) == MEANING[name]
    assert (recipe.kv_cache and recipe.kv_cache.scheme.describe()) == CACHES.get(name)
    assert recipe.name == name == recipe.source["name"]
    activation = None if weights is None else weights.activation
    looks_at_data = bool(recipe.steps) or name in CACHES or (activation is not None and activation.is_calibrated)
    assert (recipe.calibration is not None) == looks_at_data
    assert check(name) == []


@pytest.mark.parametrize("name", MEANING)
def test_it_explains_itself_in_a_few_lines(name):
    lines = shipped()[name].read_text(encoding="utf-8").splitlines()
    assert 12 <= len(lines) <= 25
    assert max(map(len, lines)) <= 120
    description = load(name).description
    assert "Use it" in description
    assert len(description) > 150


@pytest.mark.parametrize("name", [name for name, (weights, _) in MEANING.items() if weights])
def test_the_format_can_hold_it(name):
    from quantkit.formats import REGISTRY

    recipe = load(name)
    assert REGISTRY.load(recipe.format).check(recipe.scheme.default, (256, 768)) is None


@pytest.mark.parametrize("name", MEANING)
def test_it_promises_accuracy(name):
    metrics = [gate.partition(">")[0].partition("<")[0] for gate in load(name).gates]
    assert metrics == ["recovery", "perplexity_ratio", "kl"]
