"""The `kv_cache:` of a recipe: defaults, mixtures, what is refused and how."""

from __future__ import annotations

import pytest

from quantkit.compress.recipe import load
from quantkit.compress.recipe.load import build
from quantkit.errors import RecipeError

DEFAULTS = {
    "fp8": "keys fp8 per tensor, values fp8 per tensor",
    "int8": "keys int8 per channel asymmetric, values int8 per token",
    "int4": "keys int4 per channel asymmetric, values int4 per token asymmetric",
}


def made(**section):
    return build({"name": "x", "kv_cache": section}, "x.yaml")


@pytest.mark.parametrize("dtype", DEFAULTS)
def test_what_suits_a_number_type(dtype):
    recipe = made(dtype=dtype)
    assert recipe.kv_cache.scheme.describe() == DEFAULTS[dtype]
    assert recipe.scheme.default is None
    assert recipe.calibration is not None
    again = build(recipe.source, "again.yaml")
    assert (again.kv_cache, again.source) == (recipe.kv_cache, recipe.source)


def test_keys_and_values_may_differ():
    recipe = made(dtype="int4", values={"dtype": "int8"}, outliers="off")
    assert recipe.kv_cache.scheme.describe() == "keys int4 per channel asymmetric, values int8 per token"
    assert recipe.calibration is None  # nothing looks at data
    rotated = made(dtype="int4", rotation="hadamard").kv_cache.scheme
    assert rotated.describe() == "keys int4 per token asymmetric (rotated), values int4 per token asymmetric"


def test_layers_may_differ():
    layers = [
        {"numbers": [0, 2], "keys": {"dtype": "int8"}},
        {"numbers": 1, "values": {"dtype": "int2"}},
        {"numbers": 4, "skip": True},
    ]
    recipe = made(dtype="int4", values={"dtype": "int3"}, outliers="off", layers=layers)
    described = [recipe.kv_cache.of_layer(index).scheme.describe() for index in range(6)]
    assert described[0] == described[2] == "keys int8 per channel asymmetric, values int3 per token"
    assert described[1] == "keys int4 per channel asymmetric, values int2 per token"
    assert described[3] == described[5] == "keys int4 per channel asymmetric, values int3 per token"
    assert not recipe.kv_cache.of_layer(4).scheme.is_quantized
    assert recipe.calibration is None
    again = build(recipe.source, "again.yaml")
    assert (again.kv_cache, again.source) == (recipe.kv_cache, recipe.source)
    # The source has every default, whatever the section says for all layers.
    others = {"numbers": [1], "keys": {"dtype": "int8"}}, {"numbers": [2], "values": {"granularity": "token"}}
    recipe = made(dtype="int4", granularity="token", values={"dtype": "int8"}, layers=list(others))
    again = build(recipe.source, "again.yaml")
    assert (again.kv_cache, again.source) == (recipe.kv_cache, recipe.source)
    assert recipe.kv_cache.of_layer(1).scheme.key.describe() == "int8 per token"
    assert recipe.kv_cache.of_layer(2).scheme.value.describe() == "int8 per token"
    assert "layers" not in made(dtype="int4").source["kv_cache"]  # older recipes keep their identity


def test_one_field_from_outside():
    changed = load("kv-fp8", {"kv_cache.granularity": "head", "kv_cache.clip": "mse"})
    assert changed.kv_cache.scheme.key.granularity == changed.kv_cache.scheme.value.granularity == "head"
    assert changed.kv_cache.clip == "mse"
    assert changed.source != load("kv-fp8").source


REFUSED = [
    (
        {"kv_cache": {"dtype": "fp8", "granularty": "head"}},
        "kv_cache: unknown key 'granularty' .did you mean 'granularity'",
    ),
    ({"kv_cache": {"dtype": "fp9"}}, "kv_cache.dtype"),
    ({"kv_cache": {"dtype": "int2"}}, "a KV cache cannot store keys as int2"),
    ({"kv_cache": {"dtype": "fp8", "granularity": "row"}}, "kv_cache.granularity: expected"),
    ({"kv_cache": {"dtype": "int8", "granularity": "channel"}}, "a KV cache cannot store values as int8 per channel"),
    (
        {"kv_cache": {"dtype": "int4", "values": {"granularity": "channel"}}},
        "cannot store values as int4 per channel",
    ),
    ({"kv_cache": {"dtype": "fp8", "keys": {"granularity": "token"}}}, "both or neither must have fixed scales"),
    ({"kv_cache": {"dtype": "fp8", "rotation": "hadamard", "granularity": "tensor"}}, "rotation: hadamard only helps"),
    (
        {"kv_cache": {"dtype": "fp8", "layers": [{"numbers": 0, "skip": True}]}},
        "kv_cache.layers\\[0\\]: scales are fixed, so all layers need one type",
    ),
    (
        {"kv_cache": {"dtype": "int4", "layers": [{"numbers": 0, "values": {"dtype": "fp8"}}]}},
        "kv_cache.layers\\[0\\]: kv_cache: keys are int4 .* either both or neither must have fixed scales",
    ),
    (
        {"kv_cache": {"dtype": "int4", "layers": [{"numbers": [1, 2], "skip": True}, {"numbers": 2, "skip": True}]}},
        "kv_cache.layers\\[1\\]: layer 2 has two entries",
    ),
    ({"kv_cache": {"dtype": "int4", "layers": [{"numbers": 1}]}}, "give 'keys', 'values' or both, or give only 'skip"),
    ({"kv_cache": {"dtype": "int4", "layers": [{"numbers": -1, "skip": True}]}}, "the number of a layer, from 0"),
    ({"kv_cache": {"dtype": "fp8"}, "steps": ["gptq"]}, "steps: has no effect without 'weights'"),
    ({"kv_cache": {"dtype": "fp8"}, "activations": {"dtype": "fp8"}}, "activations: has no effect without 'weights'"),
    (
        {"kv_cache": {"dtype": "fp8"}, "overrides": [{"modules": "*", "weights": {"dtype": "int8"}}]},
        "overrides\\[0\\].weights changes the recipe's 'weights', but the recipe has none",
    ),
    (
        {"kv_cache": {"dtype": "int8", "outliers": "off"}, "calibration": {"samples": 4}},
        "calibration has no effect without steps",
    ),
    ({"name": "x"}, "weights: is required but missing"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_mistakes_are_one_line_with_a_way_out(data, message):
    with pytest.raises(RecipeError, match=message) as caught:
        build({"name": "x", **data}, "x.yaml")
    assert "\n" not in str(caught.value)
