"""AWQ: the search finds the best of its grid, scaling alone changes nothing, and the result beats rounding."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.algorithms.awq import AwqStep, search_ratio
from quantkit.compress.algorithms.gptq import GptqStep


@pytest.mark.parametrize("best", [0.0, 0.35, 0.5, 0.95])
def test_search_finds_the_minimum_of_a_smooth_error(best):
    tried = []
    assert search_ratio(lambda r: tried.append(r) or (r - best) ** 2, 20) == pytest.approx(best)
    assert len(tried) == len(set(tried)) <= 12


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_beats_rounding(make_layer, output_error, family, symmetric):
    def awq(layer):
        AwqStep().apply(layer)
        layer.finish()

    rounding = output_error(make_layer(family, symmetric=symmetric), lambda layer: layer.finish())
    assert output_error(make_layer(family, symmetric=symmetric), awq) < 0.97 * rounding


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_without_rounding_the_layer_computes_the_same(make_layer, output_error, family):
    """Scales are folded exactly: only rounding noise of float32 is left, biases of v included."""
    layer = make_layer(family)
    before = {name: layer.weight(name).clone() for name in layer.schemes}
    assert output_error(layer, lambda layer: AwqStep().apply(layer)) < 1e-5
    assert any(not torch.equal(before[name], layer.weight(name)) for name in before)


def test_ranges_are_left_for_whoever_rounds(make_layer):
    layer = make_layer()
    with torch.inference_mode():
        AwqStep().apply(layer)
        ranges = dict(layer.chosen.ranges)
        layer.finish()
    assert set(ranges) == set(layer.schemes)
    for name, own in ranges.items():
        assert torch.equal(layer.chosen.quantized[name].scale, own.scale)


def test_clipping_helps(make_layer, output_error):
    def run(clip):
        def work(layer):
            AwqStep(clip=clip).apply(layer)
            layer.finish()

        return output_error(make_layer(dtype="int3"), work)

    assert run(True) < run(False)


def test_gptq_can_follow(make_layer, output_error):
    def awq(layer):
        AwqStep().apply(layer)
        layer.finish()

    def both(layer):
        AwqStep().apply(layer)
        GptqStep().apply(layer)

    assert output_error(make_layer(), both) < output_error(make_layer(), awq)
