"""MXFP4 as NVFP4: exact over the whole span of an 8-bit float's powers of two, and not one further."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats import REGISTRY
from quantkit.numerics.dtype import MXFP4
from quantkit.numerics.scales import with_two_levels
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0])


def weight(exponents):
    """(N, 32 G) of all codes, from exponents (N, G)."""
    scale = torch.exp2(torch.tensor(exponents).double()).float()
    codes = CODES.repeat(scale.shape[0], 2 * scale.shape[1]).to(torch.float8_e4m3fn)
    scheme = WeightScheme(dtype=MXFP4, group_size=32)
    return QuantizedTensor(codes=codes, scale=scale, zero_point=None, scheme=scheme, value_dtype=torch.bfloat16)


@pytest.mark.parametrize("highest", [-100, -9, 0, 60])
def test_values_stay_over_18_powers_of_two(highest):
    source = weight([[highest - number for number in range(18)], [highest] * 18])
    (made,) = with_two_levels([source])
    assert torch.equal(made.dequantize(), source.dequantize())
    format_, scheme = REGISTRY.load("compressed-tensors"), LinearScheme(weight=made.scheme)
    read = format_.decode(format_.encode(made, scheme), scheme)  # which refuses scales that it cannot hold
    assert torch.equal(read.dequantize(), source.dequantize())


def test_one_number_for_all_that_share_it():
    sources = [weight([[0, -3]]), weight([[-17, -16]])]
    made = with_two_levels(sources)
    assert made[0].global_scale == made[1].global_scale == 256
    assert all(torch.equal(one.dequantize(), other.dequantize()) for one, other in zip(made, sources, strict=True))
    assert with_two_levels([sources[0], weight([[-18, -16]])]) is None


def test_groups_of_zeros_may_have_any_scale():
    source = weight([[0, -127]])
    assert with_two_levels([source]) is None
    source.codes.view(torch.uint8)[:, 32:] = 0
    (made,) = with_two_levels([source])
    assert torch.equal(made.dequantize(), source.dequantize())
    source.codes.view(torch.uint8)[:] = 0
    assert not with_two_levels([source])[0].dequantize().any()
