"""The dense format: what a loader would decode, as an ordinary weight."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import SchemeError
from quantkit.formats import REGISTRY
from quantkit.formats.dense import FORMAT
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import FP8, INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

SCHEMES = [
    WeightScheme(dtype=INT4, group_size=16),
    WeightScheme(dtype=INT4, group_size=16, symmetric=False),
    WeightScheme(dtype=INT8),
    WeightScheme(dtype=FP8),
]


def quantize(scheme: WeightScheme, scale_dtype: torch.dtype) -> QuantizedTensor:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    return round_to_nearest(weight, WeightGrid(scheme, scale_dtype))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_the_weight_is_the_decoded_one(scheme, scale_dtype):
    weight = quantize(scheme, scale_dtype)
    FORMAT.check(LinearScheme(weight=scheme), weight.shape)
    tensors = FORMAT.encode(weight, LinearScheme(weight=scheme))
    assert list(tensors) == ["weight"]
    assert tensors["weight"].dtype == scale_dtype
    assert torch.equal(tensors["weight"], weight.dequantize(scale_dtype))


def test_groups_in_activation_order():
    scheme = SCHEMES[1]
    weight = quantize(scheme, torch.float32)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    ordered = QuantizedTensor(
        codes=weight.codes[:, order],
        scale=weight.scale,
        zero_point=weight.zero_point,
        scheme=scheme,
        group_index=order // 16,
    )
    tensors = FORMAT.encode(ordered, LinearScheme(weight=scheme))
    assert torch.equal(tensors["weight"], weight.dequantize()[:, order])


def test_quantized_activations_are_refused():
    scheme = LinearScheme(weight=SCHEMES[2], activation=ActivationScheme(dtype=INT8))
    with pytest.raises(SchemeError, match=r"int8 per token activations.*--format compressed-tensors"):
        FORMAT.check(scheme, (6, 32))
    with pytest.raises(SchemeError, match="does not support"):
        FORMAT.encode(quantize(scheme.weight, torch.float32), scheme)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(SchemeError, match=r"weights\.group_size: group_size 16 does not divide 24"):
        FORMAT.check(LinearScheme(weight=SCHEMES[0]), (6, 24))


def test_it_cannot_be_decoded_or_recognised():
    scheme = LinearScheme(weight=SCHEMES[0])
    with pytest.raises(SchemeError, match="stores dequantized values"):
        FORMAT.decode({"weight": torch.zeros(6, 32)}, scheme)
    assert FORMAT.config({"a": scheme}, ["lm_head"]) == {}
    assert FORMAT.recognise({"architectures": ["LlamaForCausalLM"]}) is None


def test_the_format_is_registered():
    assert REGISTRY.load("dense") is FORMAT
