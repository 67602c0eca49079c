"""SmoothQuant: the same function before rounding, smaller outliers after, less error with quantized activations."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.algorithms import smoothquant
from quantkit.compress.algorithms.smoothquant import SmoothQuantStep, largest_weight
from quantkit.compress.calibration.observers import Magnitude
from quantkit.numerics.dtype import INT8
from quantkit.numerics.scheme import ActivationScheme

TOKENS = ActivationScheme(dtype=INT8)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_layer_computes_the_same(make_layer, output_error, family):
    assert output_error(make_layer(family), lambda layer: SmoothQuantStep().apply(layer)) < 1e-5


def test_inputs_and_weights_share_the_difficulty(make_layer):
    """At alpha 0.5 the largest input and the largest weight of a channel become proportional."""
    layer = make_layer()
    group = layer.sets[0]
    with torch.inference_mode():
        SmoothQuantStep(alpha=0.5).apply(layer)
        seen = Magnitude(64, layer.device)
        layer.observe({"self_attn.q_proj": seen})
    ratio = seen.largest / largest_weight(layer, group)
    assert (ratio.max() / ratio.min()).item() == pytest.approx(1, rel=1e-3)


def test_less_error_with_quantized_activations(make_layer, output_error):
    arguments = {"dtype": "int8", "group_size": None, "activation": TOKENS}

    def smooth(layer):
        SmoothQuantStep().apply(layer)
        layer.finish()

    plain = output_error(make_layer(**arguments), lambda layer: layer.finish())
    assert output_error(make_layer(**arguments), smooth) < plain


def test_only_sets_behind_a_norm_are_touched(make_layer):
    layer = make_layer()
    before = layer.weight("mlp.down_proj").clone()
    with torch.inference_mode():
        SmoothQuantStep().apply(layer)
    assert torch.equal(layer.weight("mlp.down_proj"), before)


@pytest.mark.parametrize(
    "activation", [TOKENS, ActivationScheme(dtype=INT8, granularity="tensor", dynamic=False), None]
)
def test_auto_has_the_least_error_of_all_values(make_layer, monkeypatch, activation):
    layer = make_layer(dtype="int8", group_size=None, activation=activation)
    measured: dict[float, float] = {}
    error = smoothquant._Smoothing.error

    def measure(smoothing, alpha):
        if "q_proj" in smoothing._names[0]:
            measured[alpha] = error(smoothing, alpha)
        return error(smoothing, alpha)

    monkeypatch.setattr(smoothquant._Smoothing, "error", measure)
    folded = []
    monkeypatch.setattr(smoothquant, "fold", lambda layer, group, scales: folded.append((group, scales)))
    with torch.inference_mode():
        SmoothQuantStep().apply(layer)
        group, scales = folded[0]
        seen = smoothquant._Inputs(64, layer.device, True)
        layer.observe({group.linears[0]: seen})
        smoothing = smoothquant._Smoothing(layer, group, seen)
        every = [error(smoothing, i / 20) for i in range(20)]
    best = min(measured, key=measured.__getitem__)
    assert torch.equal(scales, smoothing.scales(best))
    assert measured[best] <= min(every) * 1.02
    assert max(every) > 1.05 * min(every)


def test_auto_does_not_move_an_outlier_of_one_token_at_any_price(make_layer):
    """Each token counts the same, so the first token, whose output is largest, does not decide alone."""
    layer = make_layer(dtype="int8", group_size=None, activation=TOKENS)
    group = layer.sets[0]
    seen = smoothquant._Inputs(64, layer.device, True)
    rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rows[0, 3] = 1e4
    seen.update(rows)
    smoothing = smoothquant._Smoothing(layer, group, seen)
    with torch.inference_mode():
        assert smoothing.error(0.0) < smoothing.error(0.95)
