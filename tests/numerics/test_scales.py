"""Scales of whole rows as kernels keep them, and the sign that a recipe leaves them."""

from __future__ import annotations

import pytest
import torch

from quantkit.numerics.affine import WeightGrid, minmax_parameters, search_parameters
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scales import row_scales
from quantkit.numerics.scheme import WeightScheme


def served(scale):
    """What vLLM 0.32 makes of the scales of int4 weights with fp8 activations (`convert_bf16_scales_to_fp8`)."""
    outer = (scale.abs().amax(-1, keepdim=True) / 448).clamp_min(1 / (448 * 512))
    eighth = ((scale / outer).to(torch.float8_e4m3fn).float() / 8).to(torch.float8_e4m3fn).float()
    return eighth * outer * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_scales_survive_kernels_of_8_bit_scales(dtype):
    generator = torch.Generator().manual_seed(0)
    scale = 0.01 * torch.rand(64, 12, generator=generator).add(1e-3) * torch.randn(64, 12, generator=generator).sign()
    rows = row_scales(scale, dtype)
    assert torch.equal(rows.to(dtype).float(), rows) and torch.equal(rows.sign(), scale.sign())
    assert torch.equal(served(rows), rows)
    assert ((rows / scale).log2().abs().median() < 0.07) and (served(scale) != scale).float().mean() > 0.9
    assert torch.equal(row_scales(rows, dtype), rows)


def test_rows_of_tiny_scales_lose_next_to_nothing():
    scale = 1e-4 * torch.rand(8, 6, generator=torch.Generator().manual_seed(1)).add(0.1)
    rows = row_scales(scale, torch.bfloat16)
    torch.testing.assert_close(served(rows), rows, rtol=2**-8, atol=0)


def test_ranges_are_chosen_on_that_grid():
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(2)) * 0.02
    grid = WeightGrid(WeightScheme(dtype=INT4, group_size=64, row_scales="e4m3"), torch.bfloat16)
    for choose in (minmax_parameters, search_parameters):
        scale = choose(weight, grid).scale
        assert torch.equal(served(scale), scale)


def test_scales_have_one_sign_where_a_recipe_says_so():
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    signed, positive = (WeightScheme(dtype=INT4, group_size=64, signed_scales=flag) for flag in (True, False))
    assert signed == positive  # files say nothing of it
    assert (search_parameters(weight, WeightGrid(signed, torch.bfloat16)).scale < 0).any()
    assert (search_parameters(weight, WeightGrid(positive, torch.bfloat16)).scale > 0).all()
