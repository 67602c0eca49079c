"""Ranges, codes and their search, against written-out arithmetic and compressed-tensors."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import SchemeError
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.affine import (
    Ranges,
    WeightGrid,
    minmax_parameters,
    range_fractions,
    range_parameters,
    round_scale,
    round_to_nearest,
    search_parameters,
)
from quantkit.numerics.dtype import DTYPES, FP8, INT4, INT8, NF4, NVFP4, find_dtype
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

INTEGERS = [dtype for dtype in DTYPES.values() if dtype.kind == "int"]


def rounded(weight: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return round_to_nearest(weight, WeightGrid(scheme, dtype)).dequantize()


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 8])
def test_rounding_equals_compressed_tensors(dtype, symmetric, group_size, device):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    torch.manual_seed(0)
    weight = torch.randn(6, 32, device=device)
    scheme = WeightScheme(dtype=dtype, group_size=group_size, symmetric=symmetric)
    args = QuantizationArgs(
        num_bits=dtype.bits, symmetric=symmetric, group_size=group_size, strategy="group" if group_size else "channel"
    )
    groups = weight.view(6, -1, scheme.group_width(32))
    low, high = groups.amin(-1), groups.amax(-1)
    their_scale, their_zero = calculate_qparams(low, high, args)
    scale, zero, *_ = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    torch.testing.assert_close(scale, their_scale, rtol=1e-6, atol=0)
    if not symmetric:
        assert torch.equal(zero.to(torch.int8), their_zero.to(torch.int8))
    codes = round_to_nearest(weight, WeightGrid(scheme, torch.float32), Ranges(scale, zero)).codes
    theirs = quantize(weight, scale, None if symmetric else zero.to(torch.int8), args, dtype=torch.int8)
    assert torch.equal(codes, theirs)


def test_integer_grid_comes_back_exactly(device):
    """Weights that are codes times one scale have no error at all."""
    codes = torch.arange(-8, 8, device=device).repeat(3, 2).float()
    scale = torch.full((3, 2), 0.5, device=device)
    weight = codes * 0.5
    grid = WeightGrid(WeightScheme(dtype=INT4, group_size=16), torch.float32)
    back = round_to_nearest(weight, grid, Ranges(scale, None))
    assert torch.equal(back.dequantize(), weight)
    assert torch.equal(back.codes.float(), codes)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
@pytest.mark.parametrize("symmetric", [True, False])
def test_search_never_loses_to_the_covering_range(dtype, symmetric):
    torch.manual_seed(1)
    weight = torch.randn(16, 64) ** 3
    scheme = WeightScheme(dtype=dtype, group_size=16, symmetric=symmetric)
    plain = rounded(weight, scheme)
    grid = WeightGrid(scheme, torch.float32)
    searched = round_to_nearest(weight, grid, search_parameters(weight, grid))
    by_group = ((searched.dequantize() - weight) ** 2).view(16, 4, 16).sum(-1)
    assert (by_group <= ((plain - weight) ** 2).view(16, 4, 16).sum(-1) * (1 + 1e-6)).all()
    assert by_group.sum() < ((plain - weight) ** 2).sum() or dtype is INT8


def test_search_equals_exhaustive_search():
    """The chunked search finds, group by group, what a loop over the grid finds."""
    torch.manual_seed(2)
    weight, importance = torch.randn(5, 24), torch.rand(24)
    scheme = WeightScheme(dtype=INT4, group_size=8)
    scale, *_ = search_parameters(weight, WeightGrid(scheme, torch.float32), importance=importance)
    for row in range(5):
        for group in range(3):
            values, weights = weight[row, group * 8 : group * 8 + 8], importance[group * 8 : group * 8 + 8]
            trials = [s * values.abs().max() / 7.5 * f for f in range_fractions(INT4) for s in (1, -1)]
            errors = [(weights * ((values / s).round().clamp(-8, 7) * s - values) ** 2).sum() for s in trials]
            torch.testing.assert_close(scale[row, group], trials[int(torch.stack(errors).argmin())])


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
def test_either_sign_of_a_symmetric_scale_is_found(dtype):
    """Codes reach further down than up; a group whose large values are positive takes a negative scale."""
    codes = torch.tensor([dtype.minimum, dtype.maximum, 1, 0] * 2)
    weight, scheme = torch.stack([codes, -codes]) * 0.25, WeightScheme(dtype=dtype, group_size=8)
    scale, *_ = search_parameters(weight, WeightGrid(scheme, torch.float32))
    expected = [[1.0], [1.0]] if dtype is INT8 else [[1.0], [-1.0]]  # half a code in 256 is not worth a sign
    assert torch.equal(scale.sign(), torch.tensor(expected))


def test_gram_search_is_least_output_error():
    """With the group's Gram matrix, the chosen range is best for the outputs, not for the weights."""
    torch.manual_seed(3)
    inputs = torch.randn(200, 16) @ torch.randn(16, 16)
    weight, scheme = torch.randn(8, 16), WeightScheme(dtype=INT4, group_size=16)
    gram = (inputs.T @ inputs / 200)[None]

    def output_error(parameters):
        back = round_to_nearest(weight, WeightGrid(scheme, torch.float32), parameters).dequantize()
        return ((inputs @ (back - weight).T) ** 2).sum(0)

    with_gram = output_error(search_parameters(weight, WeightGrid(scheme, torch.float32), gram=gram))
    without = output_error(search_parameters(weight, WeightGrid(scheme, torch.float32)))
    assert (with_gram <= without * (1 + 1e-5)).all()
    assert with_gram.sum() < without.sum()


def test_scales_are_rounded_before_codes_are_chosen():
    """Codes belong to the scale as stored: decoding in bfloat16 arithmetic gives the same values."""
    torch.manual_seed(4)
    weight = torch.randn(4, 32)
    scheme = WeightScheme(dtype=INT4, group_size=8)
    scale, zero, *_ = search_parameters(weight, WeightGrid(scheme, torch.bfloat16))
    assert torch.equal(scale, scale.bfloat16().float())
    tensor = round_to_nearest(weight, WeightGrid(scheme, torch.bfloat16), Ranges(scale, zero))
    by_hand = (tensor.codes.to(torch.bfloat16).view(4, 4, 8) * tensor.scale.unsqueeze(-1)).view(4, 32)
    assert torch.equal(tensor.dequantize(torch.bfloat16), by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_groups_get_a_usable_scale(dtype):
    scheme = WeightScheme(dtype=INT4, group_size=4)
    scale, *_ = search_parameters(torch.zeros(2, 8), WeightGrid(scheme, dtype))
    assert (scale > 0).all()
    back = round_to_nearest(torch.zeros(2, 8), WeightGrid(scheme, dtype), Ranges(scale, None))
    assert torch.equal(back.dequantize(), torch.zeros(2, 8))


def test_tiny_scales_do_not_underflow_in_float16():
    assert (round_scale(torch.tensor([1e-9, 1e-3]), torch.float16) > 0).all()


def test_fp8_uses_the_whole_range():
    weight = torch.linspace(-3, 3, 64).view(2, 32)
    scheme = WeightScheme(dtype=FP8)
    scale, zero, *_ = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    back = round_to_nearest(weight, WeightGrid(scheme, torch.float32), Ranges(scale, zero))
    assert zero is None
    assert back.codes.dtype == torch.float8_e4m3fn
    assert back.codes.float().abs().amax(1).tolist() == [448.0, 448.0]
    assert ((back.dequantize() - weight).abs() <= weight.abs() / 16 + scale * 2**-9).all()


def test_one_sided_groups_keep_zero_representable():
    grid = WeightGrid(WeightScheme(dtype=INT4, symmetric=False), torch.float32)
    scale, zero, *_ = range_parameters(torch.zeros(1), torch.tensor([3.0]), grid)
    assert zero.item() == INT4.minimum
    assert scale.item() == pytest.approx(3 / 15)
    weight = torch.tensor([[0.5, 3.0], [-3.0, -0.5]])  # the range of such a group starts, or ends, at zero
    scale, zero, *_ = minmax_parameters(weight, grid)
    assert scale.flatten().tolist() == pytest.approx([3 / 15, 3 / 15])
    assert zero.flatten().tolist() == [INT4.minimum, INT4.maximum]


def test_a_zero_point_belongs_to_the_scale_as_it_is_stored():
    """bfloat16 rounds 5 / 255 down by 0.3 %: enough to move the zero point of a range of 255 codes."""
    grid = WeightGrid(WeightScheme(dtype=INT8, symmetric=False), torch.bfloat16)
    for low in torch.linspace(-4.5, -0.5, 20):
        scale, zero, *_ = range_parameters(low.reshape(1), 5 + low.reshape(1), grid)
        assert (low / scale + zero - INT8.minimum).abs().item() <= 0.501  # the lowest value has the lowest code


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=lambda d: d.name)
def test_token_quantization_scales_each_token_alone(dtype):
    torch.manual_seed(5)
    values = torch.randn(2, 3, 64) * torch.tensor([1.0, 100.0, 0.01]).view(1, 3, 1)
    back = fake_quantize_inputs(values, ActivationScheme(dtype=dtype))
    alone = fake_quantize_inputs(values[:, 1:2], ActivationScheme(dtype=dtype))
    assert torch.equal(back[:, 1:2], alone)
    assert ((back - values).norm(dim=-1) / values.norm(dim=-1) < 0.05).all()
    assert torch.equal(fake_quantize_inputs(torch.zeros(1, 4), ActivationScheme(dtype=dtype)), torch.zeros(1, 4))


def test_group_size_that_does_not_divide_names_those_that_engines_read():
    with pytest.raises(
        SchemeError, match=r"group_size 128 does not divide 172 inputs; set weights.group_size to channel,"
    ):
        WeightScheme(dtype=INT4, group_size=128).group_width(172)
    with pytest.raises(
        SchemeError, match=r"does not divide 576 inputs; set weights.group_size to 64 or 32 or channel,"
    ):
        WeightScheme(dtype=INT4, group_size=128).group_width(576)
    with pytest.raises(
        SchemeError, match="128x128: 128 does not divide 576 inputs, and engines compute with whole blocks"
    ):
        WeightScheme(dtype=FP8, group_size=128, block_rows=128).group_width(576)


@pytest.mark.parametrize(
    ("asked", "width", "given"),
    [(128, 576, 64), (128, 1536, 128), (128, 96, 32), (64, 96, 32), (96, 576, 96), (48, 64, 32), (128, 80, 128)],
)
def test_groups_become_the_largest_that_divides_and_that_engines_read(asked, width, given):
    assert WeightScheme(dtype=INT4, group_size=asked).fitted(width).group_size == given
    assert WeightScheme(dtype=INT4, group_size=asked, strict_groups=True).fitted(width).group_size == asked
    with pytest.raises(SchemeError, match=r"nvfp4 has a scale per 16 inputs, .*60 inputs; add this linear to ignore"):
        WeightScheme(dtype=NVFP4, group_size=16).group_width(60)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: WeightScheme(dtype=INT4, group_size=0), "not a positive number"),
        (lambda: WeightScheme(dtype=FP8, symmetric=False), "no zero point"),
        (lambda: find_dtype("int44"), "did you mean 'int4'"),
    ],
)
def test_impossible_schemes_are_refused(build, message):
    with pytest.raises(SchemeError, match=message):
        build()


def test_decoding_leaves_the_codes_as_they_are():
    """Also where they are stored as the float32 values that they mean."""
    codes = torch.tensor([[-1.0, 0.5], [0.25, 1.0]])
    weight = QuantizedTensor(
        codes=codes, scale=torch.full((2, 1), 3.0), zero_point=None, scheme=WeightScheme(dtype=NF4, group_size=2)
    )
    assert torch.equal(weight.dequantize(), 3.0 * codes)
    assert torch.equal(weight.dequantize(), 3.0 * codes)
