"""Types of ggml with whole-number scales: what the gguf package decodes, and GPTQ into their blocks."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.algorithms._gptq_factor import cholesky_factor
from quantkit.compress.algorithms._gptq_loop import settle_columns
from quantkit.compress.algorithms.gptq import GptqStep
from quantkit.errors import SchemeError
from quantkit.formats.ggml.blocks import Block, dequantize_blocks, encode_blocks, num_bytes
from quantkit.formats.gguf import FORMAT
from quantkit.numerics.affine import WeightGrid, minmax_parameters, rescaled, round_to_nearest, search_parameters
from quantkit.numerics.dtype import GGML_TYPES, INT4, INT5, INT8
from quantkit.numerics.scheme import LinearScheme, WeightScheme


def grid_of(name: str) -> WeightGrid:
    dtype = GGML_TYPES[name]
    scheme = WeightScheme(dtype=dtype, group_size=dtype.group, symmetric=not dtype.has_minimums)
    return WeightGrid(scheme, torch.bfloat16)


def samples(rows: int = 24) -> torch.Tensor:
    values = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0)) * 0.05
    values[0] = 0
    values[1], values[2, :256], values[3, :40] = 0.3, -0.2, 0.01
    values[4] *= 1e-5
    values[5] = values[5].abs() + 1  # no minimum of a block can be above zero
    return values


@pytest.mark.parametrize("name", GGML_TYPES)
@pytest.mark.parametrize("choose", [search_parameters, minmax_parameters])
def test_the_library_decodes_the_values_that_were_chosen(name, choose):
    values, grid = samples(), grid_of(name)
    scheme = LinearScheme(weight=grid.scheme)
    weight = round_to_nearest(values, grid, choose(values, grid))
    block, data = encode_blocks(weight, name.upper())
    assert data.shape == (24, num_bytes(block, (512,)))
    assert data.nbytes == weight.stored_bytes == FORMAT.linear_bytes(scheme, 24, 512, 2)
    torch.testing.assert_close(dequantize_blocks(block, data, (24, 512)), weight.dequantize(), rtol=1e-5, atol=1e-6)
    assert bool((weight.scale != 0).all())
    stored = FORMAT.encode(weight, scheme)
    assert list(stored) == [f"weight_{name}"]
    FORMAT.check_encoded("a", weight, scheme, stored)  # codes, scales and zero points come back bit for bit
    rows = torch.tensor([7, 2])
    assert torch.equal(encode_blocks(weight.take_rows(rows), name.upper())[1], data[rows])


@pytest.mark.parametrize("name", GGML_TYPES)
def test_a_search_is_better_than_covering_all_values_and_weighs_errors(name):
    values, grid = samples()[6:], grid_of(name)
    importance = torch.where(torch.arange(512) % 16 < 3, 50.0, 1.0)

    def errors(ranges):
        return (round_to_nearest(values, grid, ranges).dequantize() - values).square()

    whole, plain = errors(minmax_parameters(values, grid)), errors(search_parameters(values, grid))
    weighted = errors(search_parameters(values, grid, importance=importance))
    assert plain.sum() < 0.97 * whole.sum()
    assert (weighted * importance).sum() < 0.97 * (plain * importance).sum()


@pytest.mark.parametrize("name", GGML_TYPES)
def test_other_scales_become_whole_multiples_again(name):
    values, grid = samples()[6:], grid_of(name)
    ranges = search_parameters(values, grid)
    again = rescaled(ranges, ranges.scale * 1.01, grid)
    # Four bits of whole numbers are coarse, and small scales of a block are off by more than large ones.
    limit = 0.2 if name == "q2_k" else 0.03
    assert float(((again.scale - 1.01 * ranges.scale) / ranges.scale).abs().median()) < limit
    weight = round_to_nearest(values, grid, again)
    FORMAT.check_encoded(
        "a", weight, LinearScheme(weight=grid.scheme), FORMAT.encode(weight, LinearScheme(weight=grid.scheme))
    )


def problem(rows: int = 12, width: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(width, width, generator=generator) * torch.rand(width, generator=generator).pow(3)
    inputs = torch.randn(1200, width, generator=generator) @ mixing
    return torch.randn(rows, width, generator=generator) * 0.05, inputs.T @ inputs / 1200


def plain_loop(weight, hessian, factor, weight_of, dtype):
    """Return the codes of GPTQ by its definition: the inverse of what is left of the Hessian, column by column."""
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(hessian)).double()
    order = factor.backwards.flip(0)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    scale, zero = weight_of.scale, weight_of.zero_point
    left, codes = weight.double()[:, order].clone(), torch.empty_like(weight)
    for position, column in enumerate(order.tolist()):
        step, offset = scale[:, column // dtype.group].double(), 0.0
        if zero is not None:
            offset = zero[:, column // dtype.group].double()
        code = (left[:, position] / step + offset).round().clamp(dtype.minimum, dtype.maximum)
        codes[:, column] = code.float()
        error = (left[:, position] - (code - offset) * step) / upper[position, position]
        left[:, position + 1 :] -= error[:, None] * upper[position, position + 1 :]
    return codes


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k"])
def test_error_feedback_into_blocks_equals_the_definition(name):
    (weight, hessian), grid = problem(), grid_of(name)
    dtype = grid.scheme.dtype
    order = torch.argsort(hessian.diagonal(), descending=True)
    factor, ranges = cholesky_factor(hessian.clone(), order, 0.01), search_parameters(weight, grid)
    index = torch.arange(512) // dtype.group
    settled = settle_columns([weight], factor, index, ranges, grid.scheme, 128).codes[torch.argsort(factor.backwards)].T
    expected = plain_loop(weight, hessian, factor, ranges, dtype)
    assert (settled.float() == expected).float().mean() > 0.995  # float32 against float64 may flip a tie


@pytest.mark.parametrize("name", GGML_TYPES)
def test_error_feedback_lowers_the_error_of_the_outputs(name):
    (weight, hessian), grid = problem(), grid_of(name)
    step = GptqStep()
    (solved,) = step._solve([weight], [grid], step._factor(hessian.clone(), 10**9), torch.float32, None)

    def error(made):
        wrong = made.dequantize() - weight
        return float(((wrong @ hessian) * wrong).sum())

    scheme = LinearScheme(weight=grid.scheme)
    FORMAT.check_encoded("a", solved, scheme, FORMAT.encode(solved, scheme))
    assert error(solved) < 0.7 * error(round_to_nearest(weight, grid, search_parameters(weight, grid)))


def test_other_types_where_blocks_do_not_divide_a_row():
    def fitted(name):
        scheme = grid_of(name).scheme.fitted(576)
        return scheme.dtype, scheme.symmetric

    assert [fitted(name)[0] for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")] == [
        INT4, INT4, INT5, GGML_TYPES["q5_1"], INT8,
    ]  # fmt: skip
    assert fitted("q4_k")[1] and not fitted("q5_k")[1]
    assert grid_of("q4_k").scheme.fitted(512) == grid_of("q4_k").scheme
    with pytest.raises(SchemeError, match="q4_k has blocks of 256 inputs, which do not divide 576"):
        FORMAT.check(LinearScheme(weight=grid_of("q4_k").scheme), (8, 576))
    with pytest.raises(SchemeError, match=r"q6_k determines weights\.symmetric"):
        WeightScheme(dtype=GGML_TYPES["q6_k"], group_size=16, symmetric=False)


def test_blocks_are_named_as_in_the_library():
    assert {name.upper() for name in GGML_TYPES} <= {block.name for block in Block}
