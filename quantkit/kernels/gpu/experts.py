# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""A mixture of experts without a question to the host: who is chosen, the pairs sorted by expert, and what is added up.

A pair is a token with one of its experts. The products are in `expert_tiles`, of few tokens in `expert_rows`; what
is computed is written in `reference.experts`. Launches: three for up to 4 tokens, five for more, and the router's.
Shapes: T tokens, k experts of each, P = T k pairs, E experts, H hidden width, I width of an expert.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.gpu import attempt, power_of_two
from quantkit.kernels.gpu.expert_rows import TOKEN_LIMIT, close_rows, open_rows
from quantkit.kernels.gpu.expert_tiles import ExpertWeights, multiply_tiles, shared_of
from quantkit.kernels.gpu.gates import GATES
from quantkit.kernels.gpu.linear import PackedLinear
from quantkit.kernels.gpu.packing import PackedWeight, Packing
from quantkit.kernels.gpu.w4a16 import dequantize_weight
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference.block import gated
from quantkit.kernels.reference.linear import DenseLinear
from quantkit.kernels.types import Linear, LinearFacts

_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _route_kernel(
    scores, weights, chosen, E,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One token. Whatever its scores are, its experts exist and differ; where one is NaN, its weights are."""
    token = tl.program_id(0).to(tl.int64)
    experts, picks = tl.arange(0, BLOCK_E), tl.arange(0, PICKS)
    kept = experts < E
    score = tl.load(scores + token * E + experts, mask=kept, other=-float("inf")).to(tl.float32)
    power = tl.exp(score - tl.max(score, 0))
    share = tl.where(kept, power, 0.0)
    share = share / tl.sum(share, 0)
    # Experts that exist stay above those that do not, or that are taken.
    left = tl.where(kept, tl.where(score > _LOWEST, score, _LOWEST), -float("inf"))
    chosen_experts, value = tl.zeros((PICKS,), tl.int32), tl.zeros((PICKS,), tl.float32)
    for pick in tl.static_range(TOP_K):
        # The first of equals, so that the same scores always choose the same experts.
        best = tl.min(tl.where(left == tl.max(left, 0), experts, BLOCK_E), 0)
        chosen_experts = tl.where(picks == pick, best, chosen_experts)
        value = tl.where(picks == pick, tl.sum(tl.where(experts == best, share, 0.0), 0), value)
        left = tl.where(experts == best, -float("inf"), left)
    if NORMALIZE:
        value = value / tl.sum(value, 0)
    tl.store(chosen + token * TOP_K + picks, chosen_experts, mask=picks < TOP_K)
    tl.store(weights + token * TOP_K + picks, value, mask=picks < TOP_K)


@triton.jit
def _sort_kernel(chosen, order, starts, num_pairs, BLOCK: tl.constexpr):
    """The pairs of one expert, in order, behind those of the experts before it."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # Each program counts all pairs before its own, so that none waits for another.
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        other = tl.load(chosen + start + lanes, mask=start + lanes < num_pairs, other=2147483647)
        before += (other < expert).to(tl.int32)
    begin = tl.sum(before, 0)
    tl.store(starts + expert, begin)
    for start in range(0, num_pairs, BLOCK):
        other = tl.load(chosen + start + lanes, mask=start + lanes < num_pairs, other=-1)
        mine = (other == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, 0) - mine, start + lanes, mask=mine == 1)
        begin += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, num_pairs)


@triton.jit
def _combine_kernel(
    partials, shared, shared_score, out, H,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SCORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one token: its experts' outputs in the order in which they were chosen."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < H
    sums = tl.zeros((BLOCK,), tl.float32)
    for pick in tl.static_range(TOP_K):
        sums += tl.load(partials + (token * TOP_K + pick) * H + columns, mask=kept, other=0.0).to(tl.float32)
    # A tile of one row, as `shared_of` reads tiles.
    rows = token + tl.arange(0, 1)
    at = rows[:, None] * H + columns[None, :]
    if HAS_SHARED:
        added = shared_of(shared, shared_score, at, rows, token + 1, kept[None, :], HAS_SCORE)
        sums += tl.sum(added, 0)
    tl.store(out + token * H + columns, sums.to(out.dtype.element_ty), mask=kept)


def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`reference.experts.route`, but that what is chosen is (T, k) int32."""
    tokens, num_experts = scores.shape
    weights = torch.empty(tokens, num_chosen, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(tokens, num_chosen, dtype=torch.int32, device=scores.device)
    block = power_of_two(num_experts)
    _route_kernel[(tokens,)](
        scores, weights, chosen, num_experts,
        TOP_K=num_chosen, PICKS=power_of_two(num_chosen), NORMALIZE=normalize, BLOCK_E=block,
        num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
    return weights, chosen


def sort(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs sorted by expert, those of an expert by token.

    Args:
        chosen: (T, k) int32.
        num_experts: E.
    Returns:
        order: (P,) int32, pairs.
        starts: (E + 1,) int32, where those of each expert begin in it.
    """
    count = chosen.numel()
    order = torch.empty(count, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=chosen.device)
    _sort_kernel[(num_experts,)](chosen, order, starts, count, BLOCK=256 if count <= 256 else 2048, num_warps=4)
    return order, starts


def combine(outputs: Tensor, num_chosen: int, shared: Tensor | None, score: Tensor | None) -> Tensor:
    """Add up what the experts of each token gave.

    Args:
        outputs: (P, H) by pair, weighed already.
        num_chosen: k.
        shared: (T, H) contiguous, to be added; or None.
        score: (T, 1), weighs `shared` through a sigmoid; or None.
    Returns:
        (T, H), dtype of outputs.
    """
    tokens, width = len(outputs) // num_chosen, outputs.shape[1]
    out, block = outputs.new_empty(tokens, width), min(1024, power_of_two(width))
    _combine_kernel[(tokens, -(-width // block))](
        outputs, shared, score, out, width,
        TOP_K=num_chosen, HAS_SHARED=shared is not None, HAS_SCORE=score is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Scores (T, E) of experts to weights and numbers (T, k) of those that are chosen."""


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """All experts of a layer; see `types.StackedExperts`.

    Args:
        gate_up: N = 2 I, K = H, gates first.
        down: N = H, K = I.
        activation: a key of `gates.GATES`.
        num_chosen, normalize: see `reference.experts.route`.
        linears: see `types.StackedExperts`.
    """

    gate_up: ExpertWeights
    down: ExpertWeights
    activation: str
    num_chosen: int
    normalize: bool
    linears: tuple[LinearFacts, ...] = ()

    def __call__(
        self,
        x: Tensor,
        scores: Tensor,
        shared: Tensor | None,
        shared_score: Tensor | None,
        choose: Choose | None = None,
    ) -> Tensor:
        """See `types.StackedExperts`."""
        if len(x) == 0:
            return torch.empty_like(x)
        out = attempt("experts", x.device, self._run_together, x, scores, shared, shared_score, choose)
        return self._run_each(x, scores, shared, shared_score, choose) if out is None else out

    def _run_together(
        self, x: Tensor, scores: Tensor, shared: Tensor | None, shared_score: Tensor | None, choose: Choose | None
    ) -> Tensor:
        if choose is None:
            weights, chosen = route(scores.contiguous(), self.num_chosen, self.normalize)
        else:
            weights, chosen = choose(scores)
        return self.run(x, chosen.int(), weights, shared, shared_score)

    def _run_each(
        self, x: Tensor, scores: Tensor, shared: Tensor | None, shared_score: Tensor | None, choose: Choose | None
    ) -> Tensor:
        """Where Triton refuses: one expert after another, and the host is asked who is chosen."""
        choose = choose or partial(reference.route, num_chosen=self.num_chosen, normalize=self.normalize)
        weights, chosen = choose(scores)
        share = 1 if shared_score is None else shared_score.sigmoid()
        out = torch.zeros_like(x) if shared is None else shared * share
        return reference.run_each(x, chosen, weights, [partial(self._expert, i) for i in range(scores.shape[1])], out)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        opened = gated(functional.linear(x, _dequantized(self.gate_up, number, x.dtype)), self.activation)
        return functional.linear(opened, _dequantized(self.down, number, x.dtype))

    def run(
        self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None, score: Tensor | None = None
    ) -> Tensor:
        """What is left when the experts have been chosen.

        Args:
            x: (T, H), T from 1 on; not modified.
            chosen: (T, k) int32, different for each token.
            weights: (T, k) float32.
            shared, score: see `types.StackedExperts`.
        """
        inputs = x.contiguous()
        shared = None if shared is None else shared.contiguous()
        # So few need not be sorted: what they chose fits one tile of rows per expert.
        if len(x) <= TOKEN_LIMIT:
            opened = open_rows(inputs, self.gate_up, chosen, self.activation)
            return close_rows(opened, self.down, chosen, weights, shared, score)
        order, starts = sort(chosen, self.gate_up.words.shape[0])
        opened = multiply_tiles(inputs, self.gate_up, order, starts, chosen.shape[1], activation=self.activation)
        outputs = multiply_tiles(opened, self.down, order, starts, chosen.shape[1], weights=weights)
        return combine(outputs, chosen.shape[1], shared, score)


def stack(
    experts: Iterable[tuple[Linear, Linear]], *, count: int, activation: str, num_chosen: int, normalize: bool
) -> TritonExperts | str:
    """See `ops.experts.stack`."""
    if activation not in GATES:
        return f"there is no kernel for experts with {activation}"
    stacked: list[ExpertWeights] = []
    facts: list[LinearFacts] = []
    for number, linears in enumerate(experts):
        for index, linear in enumerate(linears):
            shape = linear.out_features, linear.in_features
            facts.append(LinearFacts(shape, linear.stored_bytes, linear.description))
            weight = _weight_of(linear)
            if isinstance(weight, str):
                return weight
            if number == 0:
                stacked.append(weight.each(lambda one: one.new_empty(count, *one.shape[1:])))
            if not _fits(stacked[index], weight):
                return f"experts are stored in several ways: expert {number} not as those before it"
            for whole, one in zip(stacked[index].arguments, weight.arguments, strict=True):
                # One by one: a layer's experts twice over might not fit the device.
                if whole is not None and one is not None:
                    whole[number].copy_(one[0])
    return TritonExperts(stacked[0], stacked[1], activation, num_chosen, normalize, tuple(facts))


def _weight_of(linear: Linear) -> ExpertWeights | str:
    """The weight of one expert, as if it were all; or why there is no kernel for it."""
    if isinstance(linear, PackedLinear) and linear.bias is None and linear.packed.packing.bits in (4, 8):
        packed = linear.packed
        return ExpertWeights(
            words=packed.words[None],
            scale=packed.scale[None],
            zero=None if packed.zero is None else packed.zero[None],
            shape=packed.shape,
            packing=packed.packing,
            outer=torch.full((1,), packed.outer, dtype=torch.float32, device=packed.words.device),
        )
    if isinstance(linear, DenseLinear) and linear.bias is None:
        shape = (linear.out_features, linear.in_features)
        words = linear.weight.contiguous()[None]
        return ExpertWeights(words=words, scale=None, zero=None, shape=shape, packing=Packing(bits=16, span=0, group=0))
    with_bias = ", with a bias" if getattr(linear, "bias", None) is not None else ""
    return f"there is no kernel for experts that are {linear.description}{with_bias}"


def _dequantized(weights: ExpertWeights, number: int, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of one expert."""
    if weights.scale is None:
        return weights.words[number]
    own = weights.each(lambda tensor: tensor[number])
    assert own.scale is not None and own.outer is not None
    shape, packing, outer = own.shape, own.packing, own.outer.item()
    packed = PackedWeight(words=own.words, scale=own.scale, zero=own.zero, shape=shape, packing=packing, outer=outer)
    return dequantize_weight(packed, dtype)


def _fits(stacked: ExpertWeights, weight: ExpertWeights) -> bool:
    """Whether a weight is stored like the others."""
    forms = [
        [None if tensor is None else (tensor.dtype, tensor.shape[1:]) for tensor in one.arguments]
        for one in (stacked, weight)
    ]
    return forms[0] == forms[1] and (stacked.shape, stacked.packing) == (weight.shape, weight.packing)
