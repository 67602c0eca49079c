"""A new algorithm is one new file, and a recipe file names it: nothing else is edited."""

from __future__ import annotations

import sys

import pytest
import torch

from quantkit.api import quantize
from quantkit.compress import algorithms
from quantkit.compress.algorithms.base import steps_bytes
from quantkit.compress.recipe import load
from quantkit.compress.recipe.load import check
from quantkit.errors import RecipeError
from tests.helpers import load_tensors

STEP = '''
"""Shrink: multiply every weight by a factor before it is rounded."""

from dataclasses import dataclass
from typing import ClassVar

from quantkit.compress.algorithms.base import LayerSizes, Step, StepBytes
from quantkit.compress.calibration.layer import LayerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkStep(Step):
    """Shrink all weights.

    Args:
        factor: of every weight.
    """

    is_for_activations: ClassVar[bool] = True

    factor: float = 0.5

    def extra_bytes(self, sizes: LayerSizes) -> StepBytes:
        return StepBytes(statistics=1234)

    def apply(self, layer: LayerContext) -> None:
        for _, names in layer.pending():
            for name in names:
                layer.weight(name).mul_(self.factor)


STEP = ShrinkStep
'''
RECIPE = """
name: shrunk
weights: {dtype: int8, group_size: channel}
calibration: {samples: 2, sequence_length: 32}
steps:
  - shrink: {factor: 0.25}
format: compressed-tensors
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe file, and beside it the step that it names."""
    (tmp_path / "shrink.py").write_text(STEP)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    path = tmp_path / "shrunk.yaml"
    path.write_text(RECIPE)
    yield path
    sys.modules.pop("quantkit.compress.algorithms.shrink", None)


def test_a_recipe_file_runs_a_new_step_with_its_option(recipe, tiny_llama, tmp_path):
    quantize(tiny_llama, recipe=recipe, output=tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    before, scale = load_tensors(tiny_llama)[name].float(), load_tensors(tmp_path / "out")[f"{name}_scale"].float()
    torch.testing.assert_close(scale.flatten() * 127.5, before.abs().amax(1) / 4, rtol=0.03, atol=0)


def test_everybody_asks_the_step_itself(recipe):
    steps = load(recipe).steps.values()
    assert steps_bytes(steps, [[(8, 8)]], 2, 0)["statistics"] == 1234
    assert check(recipe) == [
        "shrink makes activations easier to quantize, but 'activations' is not set; set it, or remove shrink"
    ]


def test_an_unknown_option_is_refused_with_the_known_one(recipe):
    recipe.write_text(RECIPE.replace("factor", "facto"))
    with pytest.raises(RecipeError, match="factor"):
        load(recipe)
