"""Mixtures of experts in Triton's interpreter against the experts one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quantkit.kernels import ops
from quantkit.kernels.gpu import experts
from quantkit.kernels.gpu import quantized_linear as packed_linear
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference.ops import DenseLinear
from quantkit.kernels.types import LinearSource, WrappedLinear
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import WeightScheme
from tests.helpers import one_of_each

CPU = torch.device("cpu")
# What experts are stored as: dtype, group, symmetric; None = 16 bits.
KINDS = [
    None,
    ("int4", 64, True),
    ("int4", 32, False),
    ("int3", 64, True),
    ("int8", None, True),
    ("fp8", None, True),
    ("nvfp4", 16, True),
    ("mxfp4", 32, True),
]
SILU = "silu"


def linear(rows, width, kind, seed):
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
    if kind is None:
        return DenseLinear(values.half(), bias=None, description="dense")
    name, group, symmetric = kind
    scheme = WeightScheme(dtype=DTYPES[name], group_size=group, symmetric=symmetric)
    weight = round_to_nearest(values, WeightGrid(scheme, torch.float16))
    return packed_linear.PackedLinear(LinearSource(weight=weight, dtype=torch.float16, device=CPU))


class Experts:
    """Some experts of one kind, and what they should compute, in float64."""

    def __init__(self, kind, *, count=4, hidden=128, width=128, num_chosen=2, activation=SILU):
        self.linears = [
            (linear(2 * width, hidden, kind, 2 * i), linear(hidden, width, kind, 2 * i + 1)) for i in range(count)
        ]
        self.stacked = experts.stack(iter(self.linears), count=count, activation=activation)
        assert isinstance(self.stacked, experts.TritonExperts)
        self.activation, self.count, self.hidden = activation, count, hidden
        self.choose = partial(reference.route, num_chosen=num_chosen, normalize=True)

    def decoded(self, number):
        weights = []
        for layer in self.linears[number]:
            packed = getattr(layer, "packed", None)
            weight = layer.weight if packed is None else packed_linear.w4a16.dequantize_weight(packed, torch.float32)
            weights.append(weight.double())
        return weights

    def expected(self, x, chosen, weights):
        def each(number):
            up, down = self.decoded(number)
            return lambda rows: ops.gated(rows @ up.T, self.activation) @ down.T

        each_one = [each(number) for number in range(self.count)]
        return reference.run_each(x.double(), chosen.long(), weights, each_one, torch.zeros_like(x.double()))

    def check(self, x, chosen, weights):
        actual = self.stacked.run(x, chosen, weights)
        assert actual.dtype == x.dtype
        torch.testing.assert_close(actual.double(), self.expected(x, chosen, weights), atol=4e-3, rtol=4e-3)


def picks(tokens, count, num_chosen, seed=0):
    scores = torch.randn(tokens, count, generator=torch.Generator().manual_seed(seed))
    weights, chosen = reference.route(scores, num_chosen, True)
    return chosen.int(), weights


def rows(tokens, hidden):
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).half()


# A few tokens, enough for tiles, and one: two of these for the first kinds, for each other kind one.
CASES = [*one_of_each(KINDS, (3, 17)), (None, 17), (("int4", 64, True), 1)]


@pytest.mark.parametrize(("kind", "tokens"), CASES, ids=str)
def test_experts(kind, tokens):
    made = Experts(kind)
    made.check(rows(tokens, made.hidden), *picks(tokens, made.count, 2))


@pytest.mark.parametrize("kind", [None, pytest.param(("int4", None, True), marks=pytest.mark.slow)], ids=str)
def test_widths_that_fill_no_tile(kind):
    """Odd numbers of experts, of inputs, of outputs; one expert of each token, or four."""
    for num_chosen, activation, tokens in ((1, "gelu_pytorch_tanh", 9), (4, "silu", 2)):
        made = Experts(kind, count=5, hidden=120, width=112, num_chosen=num_chosen, activation=activation)
        made.check(rows(tokens, made.hidden), *picks(tokens, made.count, num_chosen))


def test_all_on_one_expert():
    """More rows than a tile has, experts without any, and tokens that agree about their experts."""
    made = Experts(None, width=32, hidden=96)
    for tokens in (4, 40):
        chosen = torch.tensor([[2, 1]], dtype=torch.int32).repeat(tokens, 1)
        made.check(rows(tokens, made.hidden), chosen, torch.rand(tokens, 2))


def test_large_tiles():
    """Every size of tile, of which two are only for weights in 16 bits."""
    for kind, tokens in ((None, 33), (None, 65), (("int4", 32, True), 33)):
        made = Experts(kind, count=1, hidden=128, width=128, num_chosen=1)
        made.check(rows(tokens, made.hidden), *picks(tokens, 1, 1))


@pytest.mark.parametrize("tokens", [2, 6])
def test_what_every_token_passes_is_added(tokens):
    made = Experts(None, hidden=96, width=32)
    x, scores = rows(tokens, made.hidden), torch.randn(tokens, made.count).half()
    shared, gate = torch.randn(tokens, made.hidden).half(), torch.randn(tokens, 1).half()
    weights, chosen = reference.route(scores, 2, True)
    alone = made.expected(x, chosen, weights)
    for score, expected in ((None, alone + shared), (gate, alone + shared.double() * gate.double().sigmoid())):
        actual = made.stacked(x, scores, shared, score, made.choose)
        torch.testing.assert_close(actual.double(), expected, atol=4e-3, rtol=4e-3)
    assert made.stacked(x[:0], scores[:0], None, None, made.choose).shape == (0, made.hidden)


def test_whatever_the_scores_experts_exist():
    """Rows that fill a batch up hold anything; where a score is NaN so are the weights, as in the reference."""
    scores = torch.randn(4, 6)
    scores[0, 2], scores[1], scores[2, :5], scores[3, 1] = torch.nan, torch.nan, -torch.inf, torch.inf
    weights, chosen = reference.route(scores, 3, True)
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert chosen[2, 0] == 5
    assert weights[2].tolist() == [1.0, 0.0, 0.0]
    made = Experts(None, count=6, hidden=64, width=32, num_chosen=3)
    x = rows(6, made.hidden)
    actual = made.stacked(x, torch.cat([scores, torch.zeros(2, 6)]), None, None, made.choose)
    assert actual.isnan().all(1).tolist() == [True, True, False, True, False, False]


@pytest.mark.parametrize("pairs", [(3, 1), (40, 2), (1100, 2)])
def test_pairs_by_expert(pairs):
    """One block of pairs and several, experts without any among them."""
    chosen = torch.randint(1, 4, pairs, dtype=torch.int32)
    order, starts = experts.sort(chosen, 5)
    assert torch.equal(order.long(), chosen.view(-1).argsort(stable=True))
    assert starts.tolist() == [int((chosen < expert).sum()) for expert in range(6)]


def stack(*linears, activation=SILU):
    return experts.stack(iter(linears), count=len(linears), activation=activation)


def test_what_is_not_stacked():
    """The reason is told, and names what is in the way."""
    int4, int8 = ("int4", 32, True), ("int8", 32, True)
    one = linear(64, 128, int4, 0), linear(128, 128, int4, 1)
    assert isinstance(stack(one, one), experts.TritonExperts)
    assert "expert 1" in stack(one, (linear(64, 128, int8, 0), one[1]))
    assert "expert 1" in stack(one, (linear(64, 128, ("int4", 32, False), 0), one[1]))
    assert "relu" in stack(one, activation="relu")
    int2 = linear(64, 512, ("int2", 64, False), 0)
    assert "int2" in stack((int2, one[1]))
    biased = DenseLinear(torch.randn(64, 128), bias=torch.randn(64), description="dense")
    assert "bias" in stack((biased, one[1]))
    plain = DenseLinear(torch.randn(64, 128), bias=None, description="dense")
    rounded = WrappedLinear(plain, torch.round, "dense, int8 inputs")
    assert "int8 inputs" in stack((rounded, one[1]))
