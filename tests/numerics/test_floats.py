"""Float types: every tie and code of FP4, powers of two, scales of two levels, and a range search that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

from quantkit.numerics.affine import (
    WeightGrid,
    largest_magnitude,
    minmax_parameters,
    round_to_nearest,
    search_parameters,
    to_codes,
)
from quantkit.numerics.dtype import FP8, INT5, INT6, MXFP4, MXFP8, NVFP4
from quantkit.numerics.scales import global_scale, power_of_two_scale, storable_scale
from quantkit.numerics.scheme import WeightScheme

FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SCHEMES = {
    "fp8": WeightScheme(dtype=FP8),
    "fp8 blocks": WeightScheme(dtype=FP8, group_size=32, block_rows=16),
    "nvfp4": WeightScheme(dtype=NVFP4, group_size=16),
    "mxfp4": WeightScheme(dtype=MXFP4, group_size=32),
    "int5": WeightScheme(dtype=INT5, group_size=32),
    "int6": WeightScheme(dtype=INT6, group_size=32),
}


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(40, 128, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_fp4_rounds_every_value_and_tie_as_the_library_does():
    values = torch.cat([torch.linspace(-7, 7, 2801), torch.tensor([-0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])])
    codes = to_codes(values, torch.ones(()), None, NVFP4)
    expected = FP4_E2M1_DATA.cast_to_fp4(values.clamp(-6, 6))
    assert torch.equal(codes, expected)
    assert sorted(set(codes.abs().tolist())) == FP4_VALUES
    assert torch.equal(codes.to(NVFP4.storage).float(), codes)


def test_fp8_is_torchs_own():
    values = torch.linspace(-500, 500, 4001)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(to_codes(values, torch.ones(()), None, FP8), expected)
    assert torch.equal(to_codes(values, torch.ones(()), None, MXFP8), expected)


@pytest.mark.parametrize("dtype", [MXFP4, MXFP8])
def test_powers_of_two_are_exponents_and_fit_the_range(dtype):
    largest = torch.exp(torch.linspace(-60, 60, 2001))
    scale = power_of_two_scale(largest, dtype)
    ratio = largest / scale
    # At most a quarter of an octave above the largest code (OCP's own rule lets it be half an octave), never far below.
    assert ((ratio >= dtype.maximum / 2 * 0.87) & (ratio <= dtype.maximum * 1.17)).all()
    assert torch.equal(torch.log2(scale).round(), torch.log2(scale))
    if hasattr(torch, "float8_e8m0fnu"):
        assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    assert power_of_two_scale(torch.tensor([0.0, 1e-45, 3e38]), dtype).gt(0).all()
    assert power_of_two_scale(torch.tensor([float("nan"), float("inf")]), dtype).isnan().all()


def test_scales_of_two_levels_are_what_is_stored():
    values = weight()
    outer = global_scale(largest_magnitude(values), NVFP4)
    scale, *_ = minmax_parameters(values, WeightGrid(SCHEMES["nvfp4"], torch.bfloat16))
    local = (scale * outer).to(torch.float8_e4m3fn).float()
    assert torch.equal(local / outer, scale)
    assert local.max() == 448
    assert global_scale(torch.zeros(1), NVFP4).item() == 1
    zeros = storable_scale(torch.zeros(2, 1), NVFP4, torch.float32, torch.zeros(1))
    assert (zeros > 0).all()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_beats_the_covering_range(name, weighted):
    scheme, values = SCHEMES[name], weight()
    importance = torch.rand(128, generator=torch.Generator().manual_seed(1)) ** 4 if weighted else None

    def error(parameters) -> float:
        back = round_to_nearest(values, WeightGrid(scheme, torch.float32), parameters).dequantize()
        squares = (back - values).square()
        return (squares if importance is None else squares * importance).sum().item()

    searched = error(search_parameters(values, WeightGrid(scheme, torch.float32), importance=importance))
    gain = {"nvfp4": 0.85, "mxfp4": 0.999, "fp8": 0.97, "fp8 blocks": 0.99}.get(name, 1.0)
    assert searched <= gain * error(minmax_parameters(values, WeightGrid(scheme, torch.float32)))


def test_the_search_keeps_blocks_of_rows_together():
    values = weight()  # 40 rows: the last block has 8
    scale, *_ = search_parameters(values, WeightGrid(SCHEMES["fp8 blocks"], torch.float32))
    for start in (0, 16, 32):
        assert (scale[start : start + 16] == scale[start]).all()
    whole, *_ = search_parameters(values, WeightGrid(WeightScheme(dtype=FP8, block_rows=None), torch.float32))
    assert whole.unique().tolist() == [pytest.approx(values.abs().max().item() / 448)]


def test_a_shared_largest_magnitude_sets_the_scale_of_the_tensor():
    values, other = weight(), weight(1) * 3
    largest = torch.maximum(largest_magnitude(values), largest_magnitude(other))
    for scheme in (WeightScheme(dtype=FP8, block_rows=None), SCHEMES["nvfp4"]):
        parts = []
        for one in (values, other):
            grid = WeightGrid(scheme, torch.float32, largest)
            parts.append(round_to_nearest(one, grid, search_parameters(one, grid)))
        if scheme.dtype == NVFP4:
            assert torch.equal(parts[0].global_scale, parts[1].global_scale)
        else:
            assert torch.equal(parts[0].scale[0], parts[1].scale[0])
        for one, part in zip((values, other), parts, strict=True):
            assert (part.dequantize() - one).norm() < 0.15 * one.norm()


def test_stored_bytes_count_what_is_stored():
    for name, bits in (("nvfp4", 4.5), ("mxfp4", 4.25), ("int5", 5.5), ("fp8 blocks", 8 + 16 / 512 * 48 / 40)):
        scheme = SCHEMES[name]
        part = round_to_nearest(weight(), WeightGrid(scheme, torch.bfloat16))
        outer = 4 if name == "nvfp4" else 0
        assert part.stored_bytes == bits * 40 * 128 / 8 + outer
        assert replace(part, input_scale=torch.ones(1)).stored_bytes == part.stored_bytes
