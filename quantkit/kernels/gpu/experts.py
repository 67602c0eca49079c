"""Mixture of experts without synchronizing with the host: torch sorts and sums, and two grouped products multiply.

A pair is a token and one of its experts. `expert_tiles` holds the products; `reference.experts` defines the results.
Shapes: T tokens, k experts per token, P = T k pairs, E experts, H hidden width, I width of an expert.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.gpu import attempt
from quantkit.kernels.gpu.expert_tiles import multiply_tiles
from quantkit.kernels.gpu.gates import GATES
from quantkit.kernels.gpu.packing import PLAIN, PackedWeight
from quantkit.kernels.gpu.quantized_linear import PackedLinear
from quantkit.kernels.gpu.w4a16 import dequantize_weight
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference.ops import DenseLinear, gated
from quantkit.kernels.types import Linear, LinearFacts

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from router scores (T, E) to the weights (T, k) and the indices (T, k) of the chosen experts."""


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """All experts of a layer; see `types.StackedExperts`.

    Args:
        gate_up: gate and up weights; N = 2 I, K = H, gates first.
        down: down weights; N = H, K = I.
        activation: a key of `gates.GATES`.
        linears: see `types.StackedExperts`.
    """

    gate_up: PackedWeight
    down: PackedWeight
    activation: str
    linears: tuple[LinearFacts, ...] = ()

    def __call__(
        self, x: Tensor, scores: Tensor, shared: Tensor | None, shared_score: Tensor | None, choose: Choose
    ) -> Tensor:
        """See `types.StackedExperts`."""
        if len(x) == 0:
            return torch.empty_like(x)
        weights, chosen = choose(scores)
        together = attempt("experts", x.device, self.run, x, chosen, weights, shared, shared_score)
        if together is not None:
            return together
        # If Triton refuses, experts run one after another; the host reads which ones are chosen.
        share = 1 if shared_score is None else shared_score.sigmoid()
        out = torch.zeros_like(x) if shared is None else shared * share
        return reference.run_each(x, chosen, weights, [partial(self._expert, i) for i in range(scores.shape[1])], out)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        opened = gated(functional.linear(x, _dequantized(self.gate_up, number, x.dtype)), self.activation)
        return functional.linear(opened, _dequantized(self.down, number, x.dtype))

    def run(
        self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None, score: Tensor | None = None
    ) -> Tensor:
        """Multiply x by the weights of its chosen experts and sum their outputs.

        Args:
            x: (T, H), T at least 1; not modified.
            chosen: (T, k) indices of experts, all different within a token.
            weights: (T, k) float32, factors on the experts' outputs.
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
    """Sort pairs by expert, and by token within an expert.

    Args:
        chosen: (T, k) indices of experts.
        num_experts: E.
    Returns:
        order: (P,) int32, indices of the pairs.
        starts: (E + 1,) int32, where each expert's pairs begin in `order`.
    """
    experts, order = chosen.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=chosen.dtype, device=chosen.device)
    return order.int(), torch.searchsorted(experts, bounds, out_int32=True)


def stack(experts: Iterable[tuple[Linear, Linear]], *, count: int, activation: str) -> TritonExperts | str:
    """See `ops.linear.stack`."""
    if activation not in GATES:
        return f"there is no kernel for experts with the activation {activation}"
    stacked: list[PackedWeight] = []
    facts: list[LinearFacts] = []
    for number, linears in enumerate(experts):
        for index, linear in enumerate(linears):
            shape = linear.out_features, linear.in_features
            facts.append(LinearFacts(shape, linear.stored_bytes, linear.description))
            weight = _weight_of(linear)
            if isinstance(weight, str):
                return weight
            if number == 0:
                outer = torch.ones(count, device=weight.words.device)
                stacked.append(replace(weight.each(lambda one: one.new_empty(count, *one.shape)), outer=outer))
            if not _fits(stacked[index], weight):
                return f"experts differ in storage: expert {number} is not stored like the experts before it"
            cast(Tensor, stacked[index].outer)[number] = weight.outer
            for whole, one in zip(stacked[index].tensors, weight.tensors, strict=True):
                # Expert by expert, because two copies of all experts of a layer might not fit in the device's memory.
                if whole is not None and one is not None:
                    whole[number].copy_(one)
    return TritonExperts(stacked[0], stacked[1], activation, tuple(facts))


def _weight_of(linear: Linear) -> PackedWeight | str:
    """Return the packed weight of one expert, or the reason why no kernel supports it."""
    if isinstance(linear, PackedLinear) and linear.bias is None and linear.packed.packing.bits in (4, 8):
        return linear.packed
    if isinstance(linear, DenseLinear) and linear.bias is None:
        shape = (linear.out_features, linear.in_features)
        return PackedWeight(words=linear.weight.contiguous(), scale=None, zero=None, shape=shape, packing=PLAIN)
    with_bias = ", with a bias" if getattr(linear, "bias", None) is not None else ""
    return f"there is no kernel for experts stored as {linear.description}{with_bias}"


def _dequantized(weights: PackedWeight, number: int, dtype: torch.dtype) -> Tensor:
    """Return the weight (N, K) of one expert."""
    own = replace(weights.each(lambda tensor: tensor[number]), outer=cast(Tensor, weights.outer)[number].item())
    return own.words if own.scale is None else dequantize_weight(own, dtype)


def _fits(stacked: PackedWeight, weight: PackedWeight) -> bool:
    """Whether a weight has the storage format and shape of the weights in the stack, so that it can join them."""
    forms = [
        [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in one.tensors]
        for one in (stacked.each(lambda tensor: tensor[0]), weight)
    ]
    return forms[0] == forms[1] and (stacked.shape, stacked.packing) == (weight.shape, weight.packing)
