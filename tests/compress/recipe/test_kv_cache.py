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
