"""GPTQ's loop and fitted scales: C beside torch, bfloat16 beside float32, and what they cost."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quantkit.compress.algorithms import _gptq_fit, _gptq_loop
from quantkit.compress.algorithms._gptq_factor import Factor, cholesky_factor
from quantkit.compress.algorithms._gptq_fit import fit_scales
from quantkit.compress.algorithms._gptq_loop import Settled, settle_columns
from quantkit.numerics import native
from quantkit.numerics.affine import WeightGrid, minmax_parameters
from quantkit.numerics.dtype import INT4, INT8
from quantkit.numerics.matmul import multiplies_bfloat16
from quantkit.numerics.scheme import WeightScheme
from tests.compress.algorithms.gptq_problem import problem


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "shuffled"), [(8, False), (12, False), (12, True), (16, True), (48, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fitted_scales_are_the_least_squares_solution(implementation, group, shuffled, symmetric, dtype, monkeypatch):
    monkeypatch.setattr(_gptq_fit, "_ELEMENTS", 600)  # a few rows at a time
    monkeypatch.setattr(_gptq_fit, "_COLUMNS", 24)
    monkeypatch.setattr(_gptq_fit, "_PRODUCT_ELEMENTS", 150)
    monkeypatch.setattr(_gptq_fit, "_ROWS", 20)
    weight, hessian = problem()
    order = torch.randperm(48)
    index = (torch.randperm(48) if shuffled else torch.arange(48)) // group
    scheme = WeightScheme(dtype=INT4, group_size=group, symmetric=symmetric)
    ranges = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    factor = cholesky_factor(hessian.clone(), order, 0.01)
    settled = settle_columns([weight], factor, index, ranges, scheme, 20, keep_errors=True, dtype=dtype)
    fitted = fit_scales(settled, ranges, factor, index, dtype)
    codes = settled.codes[torch.argsort(factor.backwards)].T
    root = torch.linalg.cholesky((hessian + 0.01 * hessian.diagonal().mean() * torch.eye(48)).double())
    in_bfloat16 = implementation == "c" and native.has_avx512() and dtype == torch.bfloat16
    for row in range(len(weight)):
        values = codes[row].double() - (0 if ranges[1] is None else ranges[1][row, index].double())
        design = torch.zeros(48, 48 // group, dtype=torch.float64)
        design[torch.arange(48), index] = values
        expected = torch.linalg.lstsq(root.T @ design, root.T @ weight[row].double()).solution
        # The equations in bfloat16 change the way to the solution: by some hundredths of its length.
        way = (expected - ranges.scale[row]).abs().max().item()
        tolerance = 0.05 * way if in_bfloat16 else 1e-5
        torch.testing.assert_close(fitted[row].double(), expected, rtol=1e-3, atol=tolerance)


def test_the_hessian_is_copied_once_for_all_rows(monkeypatch):
    monkeypatch.setattr(_gptq_fit, "_PRODUCT_ELEMENTS", 3 * 48)
    monkeypatch.setattr(_gptq_fit, "_COLUMNS", 24)
    weight, hessian = problem()
    scheme, order = WeightScheme(dtype=INT4, group_size=12), torch.arange(48)
    ranges = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    factor, copied = cholesky_factor(hessian, order, 0.01), []
    settled = Settled(torch.randint(-8, 8, (48, 10), dtype=torch.int8), torch.randn(48, 10))
    whole = Factor.hessian
    monkeypatch.setattr(Factor, "hessian", lambda own, rows: copied.append(rows) or whole(own, rows))
    fit_scales(settled, ranges, factor, order // 12)
    assert copied == [slice(0, 24), slice(24, 48)]


def test_fitting_scales_costs_no_more_for_many_groups_than_a_run_of_the_loop(monkeypatch):
    """Multiplications, not time: each group's codes meet only their own rows of the factor."""
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")  # what C does is not counted
    weight, hessian = problem(width=256, rows=8)
    scheme, order = WeightScheme(dtype=INT4, group_size=16), torch.arange(256)
    ranges = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    factor = cholesky_factor(hessian, order, 0.01)
    settled = Settled(torch.randint(-8, 8, (256, 8), dtype=torch.int8), torch.randn(256, 8))
    with FlopCounterMode(display=False) as counter:
        fit_scales(settled, ranges, factor, order // 16)
    products = 2 * weight.shape[0] * 256 * 256
    assert counter.get_total_flops() < 3 * products


@pytest.mark.skipif(native.library() is None, reason=native.status())
@pytest.mark.parametrize("dtype", [INT4, INT8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [1, 31, 64, 77])
def test_c_settles_as_torch_does(monkeypatch, dtype, symmetric, rows):
    weight, hessian = problem(width=160, rows=rows)
    scheme, groups = WeightScheme(dtype=dtype, group_size=32, symmetric=symmetric), torch.arange(160) // 32
    ranges = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    factor = cholesky_factor(hessian, torch.randperm(160), 0.01)
    arguments = ([weight], factor, groups, ranges, scheme, 150)
    in_c = settle_columns(*arguments, keep_errors=True)
    monkeypatch.setattr(_gptq_loop.native, "library", lambda: None)
    in_torch = settle_columns(*arguments, keep_errors=True)
    same = (in_c.codes == in_torch.codes).all(0)  # once a tie is rounded the other way, what follows differs
    assert same.float().mean() > 0.9
    torch.testing.assert_close(in_c.errors[:, same], in_torch.errors[:, same], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason=native.status())
@pytest.mark.parametrize(("width", "block"), [(160, 48), (161, 32), (160, 33)])
def test_compensation_in_bfloat16_costs_next_to_nothing(width, block):
    weight, hessian = problem(width=width, rows=64)
    scheme, groups = WeightScheme(dtype=INT4), torch.zeros(width, dtype=torch.int64)
    ranges = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    factor = cholesky_factor(hessian.clone(), torch.randperm(width), 0.01)

    def loss(dtype):
        codes = settle_columns([weight], factor, groups, ranges, scheme, block, dtype=dtype).codes
        wrong = weight - codes[torch.argsort(factor.backwards)].T * ranges.scale
        return (wrong @ hessian * wrong).sum()

    rounded = (weight / ranges.scale).round().clamp(-8, 7) * ranges.scale - weight
    assert loss(torch.bfloat16) < 1.01 * loss(torch.float32) < 0.7 * (rounded @ hessian * rounded).sum()


@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason=native.status())
@pytest.mark.parametrize(("size", "rows"), [(8, 5), (16, 17), (32, 70), (48, 33), (128, 45)])
def test_normal_equations_in_c_are_those_of_torch(size, rows):
    codes, groups = torch.randint(-7, 8, (3 * size, rows)), 3
    inputs = torch.randn(3 * size, 200)
    hessian = (inputs @ inputs.T).bfloat16().float()  # exact in either
    found, expected = (
        _gptq_fit._normal_equations(codes.to(torch.int8), None, groups, hessian.__getitem__, in_c=in_c)
        for in_c in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
