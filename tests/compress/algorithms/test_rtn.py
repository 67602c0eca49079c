"""Rounding with calibrated ranges: fewer wrong outputs than with ranges that know the weights only."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.algorithms.rtn import RtnStep


@pytest.mark.parametrize(("dtype", "group_size"), [("int4", 16), ("int3", 16), ("int4", None), ("fp8", None)])
def test_beats_plain_rounding(make_layer, output_error, dtype, group_size):
    arguments = {"dtype": dtype, "group_size": group_size}
    plain = output_error(make_layer(**arguments), lambda layer: layer.finish())
    calibrated = output_error(make_layer(**arguments), lambda layer: (RtnStep().apply(layer), layer.finish()))
    assert calibrated < plain


def test_ranges_are_the_best_of_the_outputs_of_each_group(make_layer):
    """No other range of the grid gives a group's outputs less error, by a search over the inputs themselves."""
    from quantkit.numerics.affine import range_fractions, to_codes

    layer = make_layer()
    with torch.inference_mode():
        RtnStep().apply(layer)
    seen = [args[0].reshape(-1, 96) for args, _ in layer.capture("mlp.down_proj", 1 << 20)]
    inputs, weight = torch.cat(seen)[:, :16].double(), layer.weight("mlp.down_proj")[:, :16]
    chosen, dtype = layer.chosen.ranges["mlp.down_proj"][0], layer.schemes["mlp.down_proj"].weight.dtype

    def error(scale):
        return (inputs @ (to_codes(weight, scale, None, dtype) * scale - weight).double().T).square().sum(0)

    best = error(chosen[:, :1])
    for fraction in range_fractions(dtype):
        for sign in (1, -1):
            assert (best <= error(sign * fraction * weight.abs().amax(1, keepdim=True) / 7.5) * (1 + 1e-4)).all()
