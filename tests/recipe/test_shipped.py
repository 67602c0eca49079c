"""The recipes that come with quantkit: each loads, says what it is, and stores what its name promises."""

from __future__ import annotations

import pytest

from quantkit.recipe import check, load, shipped

MEANING = {
    "awq-int4": ("int4 g128 asym", ("awq",)),
    "fp8-dynamic": ("fp8 channel, activations fp8 per token", ()),
    "gptq-int4": ("int4 g128", ("gptq",)),
    "gptq-int8": ("int8 channel", ("gptq",)),
    "rtn-int4": ("int4 g128", ()),
    "rtn-int8": ("int8 channel", ()),
    "w8a8-int8": ("int8 channel, activations int8 per token", ("smoothquant", "gptq")),
}


def test_these_are_shipped():
    assert list(shipped()) == sorted(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_it_stores_and_does_what_its_name_promises(name):
    recipe = load(name)
    assert (recipe.scheme.default.describe(), recipe.step_names) == MEANING[name]
    assert recipe.name == name == recipe.source["name"]
    assert (recipe.calibration is None) == (not recipe.steps)
    assert check(name) == []


@pytest.mark.parametrize("name", MEANING)
def test_it_explains_itself_in_a_few_lines(name):
    lines = shipped()[name].read_text(encoding="utf-8").splitlines()
    assert 12 <= len(lines) <= 25
    assert max(map(len, lines)) <= 120
    description = load(name).description
    assert "Use it" in description
    assert len(description) > 150


@pytest.mark.parametrize("name", MEANING)
def test_the_format_can_hold_it(name):
    from quantkit.formats import REGISTRY

    recipe = load(name)
    REGISTRY.load(recipe.format).check(recipe.scheme.default, (256, 384))


@pytest.mark.parametrize("name", MEANING)
def test_it_promises_accuracy(name):
    metrics = [gate.partition(">")[0].partition("<")[0] for gate in load(name).gates]
    assert metrics == ["recovery", "perplexity_ratio", "kl"]
