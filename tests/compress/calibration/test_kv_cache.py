"""Statistics of keys and values against their definitions, scales, and the rule for outliers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.compress.calibration import kv_cache
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.kv_cache import (
    MOST_FLOAT_NOISE,
    MOST_NOISE,
    CacheStatistics,
    calibrate_cache,
    choose_scheme,
    noise,
)
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.stream import Stream
from quantkit.errors import CheckpointError, ModelError
from quantkit.kernels.reference.kv_codes import codes_of, decode_states
from quantkit.numerics.kv_cache import (
    FP8_HEAD,
    FP8_TENSOR,
    FP8_TOKEN,
    INT4_CHANNEL,
    INT4_TOKEN,
    INT8_CHANNEL,
    INT8_TOKEN,
    CacheGoal,
    hadamard,
    scheme_to_dict,
)
from quantkit.numerics.scheme import CacheScheme, KVScheme

FP8 = CacheGoal(scheme=KVScheme(key=FP8_TENSOR, value=FP8_TENSOR))


def states(*, outlier: float = 1.0, heads=2, tokens=128, width=64, seed=0) -> torch.Tensor:
    drawn = torch.randn(3, heads, tokens, width, generator=torch.Generator().manual_seed(seed))
    drawn[:, 1, :, 7] *= outlier
    return drawn


def seen(keys: torch.Tensor, rotate=False) -> CacheStatistics:
    statistics = CacheStatistics(rotate=rotate)
    statistics.update(keys[:2], 2 * keys[:2])
    statistics.update(keys[2:], 2 * keys[2:])
    return statistics


def test_statistics_are_what_they_are_called():
    keys = states(outlier=9)
    statistics = seen(keys).keys
    assert statistics.num_tokens == 3 * 128
    assert torch.equal(statistics.peak, keys.abs().amax((0, 2, 3)))
    assert torch.equal(statistics.channel_peak, keys.abs().amax((0, 2)))
    torch.testing.assert_close(statistics.mean_square(), keys.double().square().mean((0, 2)))
    ranges = (keys.amax(-1) - keys.amin(-1)).double().square().mean((0, 2))
    torch.testing.assert_close(statistics.mean_square_of_token("range"), ranges)
    torch.testing.assert_close(
        statistics.mean_square_of_token("peak"), keys.abs().amax(-1).double().square().mean((0, 2))
    )


@pytest.mark.parametrize("scheme", [INT4_TOKEN, INT4_CHANNEL, INT8_TOKEN, INT8_CHANNEL, FP8_TOKEN, FP8_TENSOR], ids=str)
@pytest.mark.parametrize("outlier", [1.0, 6.0])
def test_the_noise_is_what_rounding_does_to_an_ordinary_channel(scheme, outlier):
    keys = states(outlier=outlier)
    pages = keys.unflatten(2, (-1, 64))  # (B, H, P, S, D)
    fixed = keys.abs().max().item() / 448
    decoded = decode_states(*codes_of(pages, scheme, fixed), scheme, torch.float32, fixed)
    wrong = (decoded - pages).square().mean((0, 2, 3)) / pages.square().mean((0, 2, 3))  # (H, D)
    measured = wrong.median(1).values.max().item()
    if scheme.dtype is FP8:  # of all channels together, beside what varies within a page
        errors = (decoded - pages).square().mean((0, 2, 3)).sum(1)
        measured = (errors / pages.var(3, correction=0).mean((0, 2)).sum(1)).max().item()
    assert noise(seen(keys), scheme) == pytest.approx(measured, rel=0.25)


def test_rotated_noise_is_that_of_rotated_keys():
    keys = states(outlier=20)
    statistics = seen(keys, rotate=True)
    turned = keys @ hadamard(64)
    decoded = decode_states(*codes_of(turned, INT4_TOKEN), INT4_TOKEN, torch.float32) @ hadamard(64)
    wrong = (decoded - keys).square().mean((0, 2)) / keys.square().mean((0, 2))
    assert noise(statistics, INT4_TOKEN) == pytest.approx(wrong.median(1).values.max().item(), rel=0.25)
    assert noise(statistics, INT4_TOKEN) < noise(statistics, INT4_TOKEN, rotated=False) / 3


REMEDIES = [
    (INT4_TOKEN, "auto", 1.0, INT4_TOKEN),
    (INT4_TOKEN, "auto", 100.0, INT4_CHANNEL),
    (INT4_TOKEN, "int8", 20.0, INT8_TOKEN),
    (INT4_TOKEN, "int8", 500.0, CacheScheme()),  # 8 bits do not help either, so they are ignored
    (INT4_TOKEN, "fp8", 500.0, FP8_TOKEN),
    (INT4_TOKEN, "leave", 100.0, CacheScheme()),
    (INT8_TOKEN, "auto", 20.0, INT8_TOKEN),
    (INT8_TOKEN, "auto", 500.0, INT8_CHANNEL),
    (INT8_CHANNEL, "auto", 500.0, INT8_CHANNEL),
    (INT4_CHANNEL, "auto", 500.0, INT4_CHANNEL),
    (FP8_TENSOR, "auto", 500.0, FP8_TENSOR),
    (FP8_TENSOR, "auto", 1e6, INT8_CHANNEL),
    (FP8_TENSOR, "leave", 1e6, CacheScheme()),
]


def test_large_biases_are_too_much_for_floats_and_not_for_ranges_per_channel():
    """As in Qwen2: their rounding errors, a share of the bias, differ from token to token."""
    keys = states(outlier=1.0)
    keys[..., 5] += 150
    statistics, goal = seen(keys), CacheGoal(scheme=KVScheme(key=FP8_TENSOR, value=FP8_TENSOR))
    assert noise(statistics, FP8_TENSOR) > 10 * MOST_FLOAT_NOISE
    assert choose_scheme(statistics, goal).key == INT8_CHANNEL
    assert noise(seen(states(outlier=1.0)), FP8_TENSOR) < MOST_FLOAT_NOISE / 5


@pytest.mark.parametrize(("asked", "remedy", "outlier", "expected"), REMEDIES)
def test_the_first_remedy_that_helps(asked, remedy, outlier, expected):
    goal = CacheGoal(scheme=KVScheme(key=asked, value=INT8_TOKEN), remedy=remedy)
    statistics = seen(states(outlier=outlier))
    scheme = choose_scheme(statistics, goal)
    assert scheme == KVScheme(key=expected, value=INT8_TOKEN)
    assert noise(statistics, scheme.key) <= (MOST_FLOAT_NOISE if scheme.key.dtype is FP8 else MOST_NOISE)
    assert choose_scheme(statistics, dataclasses.replace(goal, outliers=False)).key == asked


def test_a_remedy_takes_the_rotation_away():
    goal = CacheGoal(scheme=KVScheme(key=INT4_TOKEN, value=INT4_TOKEN, rotation="hadamard"))
    assert choose_scheme(seen(states(outlier=20), rotate=True), goal).rotation == "hadamard"
    assert choose_scheme(seen(states(outlier=2000), rotate=True), goal).rotation == "none"


class Attention(torch.nn.Module):
    """Hands the cache keys that are the hidden states times one number and values that are zero in one head."""

    def forward(self, hidden_states, past_key_values=None):
        keys = hidden_states.unflatten(-1, (2, 64)).transpose(1, 2)
        if past_key_values is not None:
            values = keys * torch.tensor([3.0, 0.0]).view(2, 1, 1)
            past_key_values.update(5 * keys, values, 0)
        return hidden_states


class Block(torch.nn.Module):
    def __init__(self, cached=True) -> None:
        super().__init__()
        self.norm, self.self_attn, self._cached = torch.nn.LayerNorm(8), Attention(), cached

    def forward(self, hidden_states, past_key_values=None):
        return self.self_attn(hidden_states, past_key_values if self._cached else None)


def layer(hidden, **options) -> LayerContext:
    store = ActivationStore(None, "ram", iter([hidden[:1], hidden[1:]]))
    return LayerContext(
        name="model.layers.0",
        stream=Stream(Block(**options), store),
        sets=(),
        schemes={},
        scale_dtype={},
        head_dim=64,
    )


HIDDEN = torch.rand(3, 20, 128, generator=torch.Generator().manual_seed(3)) - 0.5


def test_fixed_scales_are_the_largest_number_over_448():
    hidden = HIDDEN.clone()
    hidden[2, 11, 70] = -7.0  # in head 1
    cache = calibrate_cache(layer(hidden), FP8)
    assert cache.key_scale == pytest.approx((35.0 / 448,))
    assert cache.value_scale == pytest.approx((3 * hidden[..., :64].abs().max().item() / 448,))
    heads = CacheGoal(scheme=KVScheme(key=FP8_HEAD, value=INT8_TOKEN))
    cache = calibrate_cache(layer(hidden), heads)
    assert cache.key_scale == pytest.approx((5 * hidden[..., :64].abs().max().item() / 448, 35.0 / 448))
    assert cache.value_scale == ()  # not stored: each token has its own


def test_what_has_no_scale_is_refused():
    heads = CacheGoal(scheme=KVScheme(key=FP8_HEAD, value=FP8_HEAD))
    with pytest.raises(CheckpointError, match="all values of head 1 are zero"):
        calibrate_cache(layer(HIDDEN), heads)
    with pytest.raises(CheckpointError, match="all keys are zero"):
        calibrate_cache(layer(0 * HIDDEN), FP8)
    with pytest.raises(CheckpointError, match="hidden states after the embedding are not finite"):
        calibrate_cache(layer(HIDDEN * float("inf")), FP8)
    with pytest.raises(ModelError, match="passes its keys and values to no cache"):
        calibrate_cache(layer(HIDDEN, cached=False), FP8)


def test_clipping_by_error_never_does_worse():
    """One number far above the rest: to cover it pushes the rest among the subnormal codes."""
    hidden = HIDDEN.clone() * 1e-4
    hidden[0, 0, 0] = 0.3
    clipped = calibrate_cache(layer(hidden), dataclasses.replace(FP8, clip="mse")).key_scale[0]
    covering = calibrate_cache(layer(hidden), FP8).key_scale[0]
    keys = 5 * hidden[:1].flatten()

    def error(scale):
        return (
            (decode_states(*codes_of(keys, FP8_TENSOR, scale), FP8_TENSOR, torch.float32, scale) - keys).square().sum()
        )

    assert error(clipped) <= error(covering)


def test_no_data_is_looked_at_where_none_is_needed(monkeypatch):
    monkeypatch.setattr(kv_cache, "observe_cache", None)
    goal = CacheGoal(scheme=KVScheme(key=INT8_TOKEN, value=INT8_TOKEN), outliers=False)
    context = layer(HIDDEN)
    cache = calibrate_cache(context, goal)
    assert (cache.scheme, context.chosen.notes) == (scheme_to_dict(goal.scheme), [])
