"""Folding a scale into a source changes weights and norms, but not what the layer computes."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.algorithms._smoothing import can_fold, fold, shared_by_heads, spread
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from tests.helpers import FAMILIES


def random_scales(layer, group):
    torch.manual_seed(3)
    return shared_by_heads(layer, group, torch.rand(layer.weight(group.linears[0]).shape[1]).add(0.2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(4))
def test_the_layer_computes_the_same(make_layer, output_error, family, number):
    layer = make_layer(family)
    group = layer.sets[number]
    before = layer.weight(group.linears[0]).clone()
    assert can_fold(layer, group)
    assert output_error(layer, lambda layer: fold(layer, group, random_scales(layer, group))) < 1e-5
    torch.testing.assert_close(layer.weight(group.linears[0]), before * random_scales(layer, group))


def test_a_linear_ignored_follows_its_set(make_layer, output_error):
    """k is not quantized but reads what q reads: it must follow the norm that shrank."""
    layer = make_layer(ignored=("self_attn.k_proj",))
    before = layer.weight("self_attn.k_proj").clone()
    group = layer.sets[0]
    assert output_error(layer, lambda layer: fold(layer, group, random_scales(layer, group))) < 1e-5
    assert not torch.equal(layer.weight("self_attn.k_proj"), before)


def test_query_heads_of_one_value_head_share_their_scale(make_layer):
    layer = make_layer()
    shared = shared_by_heads(layer, layer.sets[1], torch.arange(64.0)).view(2, 2, 16)
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert shared[0, 0, 0] == (0 + 16) / 2


def test_a_source_in_codes_cannot_absorb_a_scale(make_layer):
    layer = make_layer()
    weight, scheme = layer.weight("self_attn.v_proj"), layer.schemes["self_attn.v_proj"].weight
    layer.commit({"self_attn.v_proj": round_to_nearest(weight, WeightGrid(scheme, torch.float32))})
    assert not can_fold(layer, layer.sets[1])
    assert not can_fold(layer, layer.sets[0])  # it reads what would be divided, and cannot be multiplied
    assert can_fold(layer, layer.sets[2])


def test_spread_centres_and_survives_anything():
    scales = spread(torch.tensor([4.0, 1.0, 0.25]))
    assert scales.max() * scales.min() == pytest.approx(1)
    wild = spread(torch.tensor([0.0, torch.inf, torch.nan, 2.0]))
    assert torch.isfinite(wild).all()
    assert (wild > 0).all()
