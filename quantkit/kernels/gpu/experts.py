"""A mixture of experts without a question to the host: torch sorts and adds up, two grouped products multiply.

A pair is a token with one of its experts. The products are in `expert_tiles`, their meaning in `reference.experts`.
Shapes: T tokens, k experts of each, P = T k pairs, E experts, H hidden width, I width of an expert.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.gpu import attempt
from quantkit.kernels.gpu.expert_tiles import ExpertWeights, multiply_tiles
from quantkit.kernels.gpu.gates import GATES
from quantkit.kernels.gpu.packing import PackedWeight, Packing
from quantkit.kernels.gpu.quantized_linear import PackedLinear
from quantkit.kernels.gpu.w4a16 import dequantize_weight
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference.block import DenseLinear, gated
from quantkit.kernels.types import Linear, LinearFacts

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
        weights, chosen = (choose or self._route)(scores)
        return self.run(x, chosen, weights, shared, shared_score)

    def _route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return reference.route(scores, self.num_chosen, self.normalize)

    def _run_each(
        self, x: Tensor, scores: Tensor, shared: Tensor | None, shared_score: Tensor | None, choose: Choose | None
    ) -> Tensor:
        """Run one expert after another where Triton refuses; the host reads which ones are chosen."""
        weights, chosen = (choose or self._route)(scores)
        share = 1 if shared_score is None else shared_score.sigmoid()
        out = torch.zeros_like(x) if shared is None else shared * share
        return reference.run_each(x, chosen, weights, [partial(self._expert, i) for i in range(scores.shape[1])], out)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        opened = gated(functional.linear(x, _dequantized(self.gate_up, number, x.dtype)), self.activation)
        return functional.linear(opened, _dequantized(self.down, number, x.dtype))

    def run(
        self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None, score: Tensor | None = None
    ) -> Tensor:
        """Multiply and add up, once the experts have been chosen.

        Args:
            x: (T, H), T from 1 on; not modified.
            chosen: (T, k), different for each token.
            weights: (T, k) float32.
            shared, score: see `types.StackedExperts`.
        """
        order, starts = sort(chosen, self.gate_up.words.shape[0])
        picks = chosen.shape[1]
        opened = multiply_tiles(x.contiguous(), self.gate_up, order, starts, picks, activation=self.activation)
        outputs = multiply_tiles(opened, self.down, order, starts, picks, weights=weights.contiguous())
        sums = outputs.view(len(x), picks, -1).float().sum(1)
        if shared is not None:
            sums += shared.float() if score is None else shared.float() * score.float().sigmoid()
        return sums.to(x.dtype)


def sort(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert, those of an expert by token.

    Args:
        chosen: (T, k) numbers of experts.
        num_experts: E.
    Returns:
        order: (P,) int32, pairs.
        starts: (E + 1,) int32, where those of each expert begin in it.
    """
    experts, order = chosen.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=chosen.dtype, device=chosen.device)
    return order.int(), torch.searchsorted(experts, bounds, out_int32=True)


def stack(
    experts: Iterable[tuple[Linear, Linear]], *, count: int, activation: str, num_chosen: int, normalize: bool
) -> TritonExperts | str:
    """See `ops.linear.stack`."""
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
