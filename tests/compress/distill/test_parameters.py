"""Trained scales: values and gradients against plain formulas, and only numbers that the format can store."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.distill.parameters import TrainedScales, TrainedVector, is_trainable
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scales import row_scales
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

CPU = torch.device("cpu")


def integers(*, order: bool = False, dtype: torch.dtype = torch.float32) -> tuple[QuantizedTensor, LinearScheme]:
    """A (6, 16) weight in int3 with zero points and groups of 4; with `order`, groups are not in input order."""
    scheme = WeightScheme(dtype=find_dtype("int3"), group_size=4, symmetric=False)
    generator = torch.Generator().manual_seed(0)
    weight = QuantizedTensor(
        codes=torch.randint(-4, 4, (6, 16), generator=generator, dtype=torch.int8),
        scale=(0.1 + torch.rand(6, 4, generator=generator)).to(dtype),
        zero_point=torch.randint(-4, 4, (6, 4), generator=generator, dtype=torch.int8),
        scheme=scheme,
        group_index=torch.arange(16).flip(0) // 4 if order else None,
    )
    return weight, LinearScheme(weight=scheme)


def nvfp4() -> tuple[QuantizedTensor, LinearScheme]:
    """A (4, 32) weight in NVFP4."""
    scheme = WeightScheme(dtype=find_dtype("nvfp4"), group_size=16)
    outer = torch.tensor([100.0])
    local = torch.tensor([[1.0, 2.0], [3.5, 4.0], [0.5, 6.0], [7.0, 8.0]])
    codes = torch.tensor([0.5, -1.0, 3.0, 6.0]).repeat(4, 8)
    weight = QuantizedTensor(codes=codes, scale=local / outer, zero_point=None, scheme=scheme, global_scale=outer)
    return weight, LinearScheme(weight=scheme)


@pytest.mark.parametrize("order", [False, True])
def test_product_and_gradients_are_those_of_the_plain_formula(order):
    weight, scheme = integers(order=order)
    trained, inputs, bias = TrainedScales(weight, scheme, CPU), torch.randn(5, 16), torch.randn(6).requires_grad_()
    left, right = (inputs.clone().requires_grad_() for _ in range(2))
    change = torch.zeros(6, 4, requires_grad=True)
    groups = torch.arange(16).flip(0) // 4 if order else torch.arange(16) // 4
    scale = (weight.scale * (1 + change))[:, groups]
    expected = right @ ((weight.codes - weight.zero_point[:, groups]) * scale).T + bias
    found = trained.product(left, bias)
    assert torch.allclose(found, expected, atol=1e-5)
    toward = torch.randn_like(found)
    expected_gradients = torch.autograd.grad(expected, (change, right, bias), toward)
    found_gradients = torch.autograd.grad(found, (trained.change, left, bias), toward)
    for own, plain in zip(found_gradients, expected_gradients, strict=True):
        assert torch.allclose(own, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [integers, nvfp4])
def test_without_a_change_the_weight_is_the_same(make):
    weight, scheme = make()
    result = TrainedScales(weight, scheme, CPU).result()
    assert torch.equal(result.scale, weight.scale) and result.scale.dtype == weight.scale.dtype
    assert torch.equal(result.codes, weight.codes)


def test_scales_stay_in_the_stored_dtype():
    weight, scheme = integers(dtype=torch.bfloat16)
    trained = TrainedScales(weight, scheme, CPU)
    trained.change.data.fill_(0.013)
    scale = trained.result().scale
    assert scale.dtype == torch.bfloat16 and torch.equal(scale, (weight.scale.float() * 1.013).bfloat16())


def test_two_level_scales_stay_8_bit_floats_under_the_same_global_scale():
    weight, scheme = nvfp4()
    trained = TrainedScales(weight, scheme, CPU)
    trained.change.data.fill_(0.08)
    result = trained.result()
    local = result.scale * weight.global_scale
    assert torch.allclose(local, local.to(torch.float8_e4m3fn).float(), rtol=1e-6)
    assert torch.equal(result.global_scale, weight.global_scale) and not torch.equal(result.scale, weight.scale)


@pytest.mark.parametrize(
    ("dtype", "fields", "trained"),
    [
        ("int4", {"group_size": 32}, True),
        ("fp8", {}, True),
        ("nvfp4", {"group_size": 16}, True),
        ("mxfp4", {"group_size": 32}, False),  # powers of two
        ("fp8", {"block_rows": 128, "group_size": 128}, False),
        ("int8", {"block_rows": None}, False),
    ],
)
def test_which_scales_are_trained(dtype, fields, trained):
    assert is_trainable(WeightScheme(dtype=find_dtype(dtype), **fields)) == trained


def test_a_weight_whose_scales_are_fixed_still_passes_gradients_on():
    scheme = WeightScheme(dtype=find_dtype("int8"), block_rows=None)
    codes = torch.randint(-128, 128, (4, 8), dtype=torch.int8)
    weight = QuantizedTensor(codes=codes, scale=torch.full((4, 1), 0.01), zero_point=None, scheme=scheme)
    trained, inputs = TrainedScales(weight, LinearScheme(weight=scheme), CPU), torch.randn(3, 8, requires_grad=True)
    assert trained.change is None and trained.result() is trained.weight
    (gradient,) = torch.autograd.grad(trained.product(inputs, None).sum(), inputs)
    assert torch.allclose(gradient, weight.dequantize().sum(0).expand(3, -1), atol=1e-5)


def test_a_vector_moves_in_units_of_its_size():
    start = torch.tensor([3.0, -4.0, 0.0]).bfloat16()
    vector = TrainedVector(start, CPU)
    assert torch.equal(vector.result(), start)
    vector.change.data.fill_(0.1)
    moved = start.float() + 0.1 * start.float().square().mean().sqrt()
    assert torch.equal(vector.value(), moved.bfloat16().float())  # as the checkpoint stores it
    assert torch.equal(vector.result(), moved.bfloat16())
    (gradient,) = torch.autograd.grad(vector.value().sum(), vector.change)
    assert torch.allclose(gradient, start.float().square().mean().sqrt().expand(3))


def test_scales_that_training_does_not_change_stay_as_another_tool_rounded_them():
    scheme = WeightScheme(dtype=find_dtype("int4"), group_size=4)
    scale = torch.tensor([[0.1234, 0.0], [3.0, 0.7]])
    codes = torch.ones(2, 8, dtype=torch.int8)
    weight = QuantizedTensor(codes=codes, scale=scale, zero_point=None, scheme=scheme)
    fp8 = ActivationScheme(dtype=find_dtype("fp8"))
    trained = TrainedScales(weight, LinearScheme(weight=scheme, activation=fp8), CPU)
    assert torch.equal(trained.result().scale, scale)
    trained.change.data.fill_(0.02)
    moved = trained.result().scale
    assert torch.equal(moved, torch.where(scale == 0, scale, row_scales(scale * 1.02, torch.float32)))
