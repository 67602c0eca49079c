"""Logits and the likeliest tokens in Triton's interpreter against torch."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels import gpu
from quantkit.kernels.gpu import choices, configs, partial_argmax
from quantkit.kernels.gpu import head as on_gpu
from quantkit.kernels.gpu.linear import PackedLinear
from quantkit.kernels.ops.head import logits
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.types import LinearSource
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import WeightScheme
from tests.helpers import one_of_each

CPU = torch.device("cpu")
INT8 = WeightScheme(dtype=DTYPES["int8"], group_size=None, symmetric=True)


def rounded(values, scheme=INT8):
    return round_to_nearest(values, WeightGrid(scheme, torch.float16))


def packed(weight, dtype, bias=None):
    return PackedLinear(LinearSource(weight=weight, bias=bias, dtype=dtype, device=CPU))


class Known:
    """A head whose products are given."""

    def __init__(self, products):
        self.products = products

    def __call__(self, x):
        return self.products


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 30.0), (2.0, 5.0)])
@pytest.mark.parametrize("shape", [(1, 300), (3, 4500)])
def test_logits_and_the_likeliest(monkeypatch, shape, scale, softcap):
    torch.manual_seed(0)
    products = (10 * torch.randn(shape)).to(torch.float16)
    expected, none = logits(Known(products), torch.empty(0), scale=scale, softcap=softcap)
    assert none is None
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    actual = on_gpu.logits(Known(products), torch.empty(0), scale, softcap)
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual[0], expected, atol=1e-5 * (softcap or 0), rtol=1e-6)
    assert torch.equal(actual[1], actual[0].argmax(-1))


def test_the_first_of_equals_and_nan():
    """Across the borders of tiles; a row of a larger product; no finite number at all."""
    products = torch.zeros(5, 6000)[:, :5000]
    products[0, [4999, 2048, 2047]] = 3.0
    products[1] = -torch.inf
    products[2, 4100] = torch.nan
    products[2, 7] = torch.inf
    products[3, 9] = -0.0
    products[3, 10:] = -1.0
    products[4, 4999] = 1e-30
    actual = on_gpu.logits(Known(products), torch.empty(0), 1.0, None)
    assert actual[1].tolist() == [2047, 0, 4100, 0, 4999]
    torch.testing.assert_close(actual[0], products, equal_nan=True)


def test_many_tiles_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(partial_argmax, "_MOST_AT_ONCE", 64)
    order = torch.randint(-(10**9), 10**9, (2, 2, 200), dtype=torch.int32)
    order[:, 1] = torch.arange(200) * 7
    order[0, 0, [3, 70, 199]] = 2 * 10**9
    order[1, 0, [130, 128]] = 2 * 10**9
    assert partial_argmax.argmax(order).tolist() == [21, 128 * 7]


def test_rows_that_nobody_draws_from_have_no_likeliest(monkeypatch):
    monkeypatch.setattr(on_gpu, "MOST_ROWS", 2)
    head = build_linear(torch.randn(40, 16), dtype=torch.float32, device=CPU)
    x = torch.randn(3, 16)
    values, best = on_gpu.logits(head, x, 1.0, None)
    assert best is None
    torch.testing.assert_close(values, head(x))


HEADS = {
    "int8": ("int8", None, (300, 256)),
    "int4": ("int4", 32, (50, 256)),
    "int8 split": ("int8", 64, (64, 2048)),
}


@pytest.mark.parametrize(("kind", "rows"), one_of_each(HEADS, (1, 5, 3)))
def test_packed_heads(monkeypatch, kind, rows):
    """A product per row, in tiles, split; outputs that are no multiple of a tile."""
    name, group, shape = HEADS[kind]
    torch.manual_seed(1)
    scheme = WeightScheme(dtype=DTYPES[name], group_size=group, symmetric=True)
    head = packed(rounded(torch.randn(shape), scheme), torch.float32, torch.randn(shape[0]))
    x = torch.randn(rows, shape[1])
    for scale, softcap in ((1.0, None), (0.5, 20.0)):
        expected, _ = logits(Known(head(x)), x, scale=scale, softcap=softcap)
        actual, best = on_gpu.logits(head, x, scale, softcap)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-6)
        assert torch.equal(best, actual.argmax(-1))


def test_a_packed_head_is_not_rounded_to_16_bits_and_its_ties_go_to_the_first():
    head = packed(rounded(torch.ones(96, 128)), torch.float16)
    x = torch.ones(2, 128, dtype=torch.float16)
    x[:, 0] = 1 + 2**-10
    values, best = on_gpu.logits(head, x, 1.0, None)
    assert best.tolist() == [0, 0]
    assert not torch.equal(values, values.to(torch.float16).float())


def test_many_rows_of_a_packed_head_are_for_cublas(monkeypatch):
    head = packed(rounded(torch.randn(40, 128)), torch.float32)
    assert head.logits(torch.randn(choices.TILE_LIMIT + 1, 128), 1.0, 0.0) is None
    x = torch.randn(70, 128)
    with configs.forced(choices.Cublas()):
        assert head.logits(x, 1.0, 0.0) is None
        values, best = on_gpu.logits(head, x, 1.0, None)
        torch.testing.assert_close(values, head(x))
    assert torch.equal(best, values.argmax(-1))
