"""The range of an input: everything seen, or what costs least; every channel counts."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.calibration.input_scales import InputRange, _choose
from quantkit.numerics.activation_quant import fake_quantize_inputs, input_scale
from quantkit.numerics.dtype import FP8, INT8
from quantkit.numerics.scheme import ActivationScheme


def static(dtype) -> ActivationScheme:
    return ActivationScheme(dtype=dtype, granularity="tensor", dynamic=False)


def seen(*batches: torch.Tensor) -> InputRange:
    observer = InputRange(keep=True)
    for batch in batches:
        observer.update(batch)
    return observer


def test_the_largest_of_all_batches_counts():
    observer = seen(torch.tensor([[1.0, -3.0]]), torch.zeros(0, 2), torch.tensor([[2.0, 0.5]]).bfloat16())
    assert observer.largest == 3
    assert seen().largest == 0
    assert _choose(observer, static(FP8), "absmax") == 3


def test_kept_rows_hold_every_channel():
    values = torch.zeros(4096, 64)
    values[:, 37] = 9
    assert (seen(values).values == 9).sum() * 64 == seen(values).values.numel()


def test_mse_cuts_off_what_is_rare_and_only_that():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2000, 64, generator=generator)
    assert _choose(seen(values), static(FP8), "mse") == pytest.approx(values.abs().max().item(), rel=0.5)
    values[1000, 3] = 40
    observer = seen(values)
    chosen = _choose(observer, static(INT8), "mse")
    assert chosen < 35

    def error(largest: float) -> float:
        scale = input_scale(torch.tensor(largest), static(INT8), torch.float32)
        return (fake_quantize_inputs(values, static(INT8), scale) - values).square().mean().item()

    assert error(chosen) < error(40.0)
