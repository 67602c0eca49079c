"""Rules and patterns, and the size that a quantized tensor says it has."""

from __future__ import annotations

import torch

from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

FOUR = LinearScheme(weight=WeightScheme(dtype=INT4, group_size=32))
EIGHT = LinearScheme(weight=WeightScheme(dtype=INT8))


def test_the_last_matching_rule_wins():
    scheme = Scheme(
        default=FOUR,
        rules=(
            Rule(pattern="*.down_proj", linear=EIGHT),
            Rule(pattern=r"re:model\.layers\.[01]\..*", linear=None),
            Rule(pattern="model.layers.1.mlp.down_proj", linear=FOUR),
        ),
    )
    assert scheme.find("model.layers.5.mlp.down_proj") is EIGHT
    assert scheme.find("model.layers.5.mlp.up_proj") is FOUR
    assert scheme.find("model.layers.0.mlp.down_proj") is None
    assert scheme.find("model.layers.10.mlp.up_proj") is FOUR
    assert scheme.find("model.layers.1.mlp.down_proj") is FOUR


def test_descriptions_name_what_differs():
    assert FOUR.describe() == "int4 g32"
    assert WeightScheme(dtype=INT4, symmetric=False).describe() == "int4 channel asym"
    both = LinearScheme(weight=EIGHT.weight, activation=ActivationScheme(dtype=INT8))
    assert both.describe() == "int8 channel, activations int8 per token"


def test_stored_bytes_count_codes_scales_and_zero_points():
    weight = torch.randn(8, 64)
    scheme = WeightScheme(dtype=INT4, group_size=32, symmetric=False)
    tensor = round_to_nearest(weight, WeightGrid(scheme, torch.float16))
    assert tensor.shape == (8, 64)
    assert tensor.stored_bytes == 8 * 64 // 2 + 16 * 2 + 16 // 2


def test_group_index_maps_inputs_to_their_groups():
    index = torch.tensor([1, 0, 1, 0])
    tensor = QuantizedTensor(
        codes=torch.tensor([[1, 2, 3, 4]], dtype=torch.int8),
        scale=torch.tensor([[10.0, 1.0]]),
        zero_point=torch.tensor([[1, 0]], dtype=torch.int8),
        scheme=WeightScheme(dtype=INT4, group_size=2, symmetric=False),
        group_index=index,
    )
    assert tensor.dequantize().tolist() == [[1.0, 10.0, 3.0, 30.0]]
