"""A mixture of experts in place of the MLP: a router chooses a few for each token, their outputs are weighed and added.

Tokens are gathered expert by expert, so each expert multiplies once, whatever the batch. Shapes: T tokens, H hidden
width, E experts, k of them for each token.
Source: Shazeer et al. 2017, Outrageously Large Neural Networks; Jiang et al. 2024 (Mixtral); Yang et al. 2024 (Qwen2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.kernels.linear import Linear
from quantkit.runtime.layers import MLP


def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token and how much each counts.

    Args:
        scores: (T, E) router logits, any float dtype.
        num_chosen: k.
        normalize: the weights of the chosen are made to sum to one.
    Returns:
        weights: (T, k) float32.
        chosen: (T, k) int64.
    """
    weights, chosen = scores.float().softmax(dim=-1).topk(num_chosen, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


class Mixture:
    """Experts of one layer.

    Args:
        router: (T, H) -> (T, E).
        experts: one MLP each.
        num_chosen, normalize: see `route`.
        shared: an MLP that every token passes, or None.
        shared_gate: (T, H) -> (T, 1), weighs its output through a sigmoid; None = it counts fully.
    """

    def __init__(
        self,
        *,
        router: Linear,
        experts: Sequence[MLP],
        num_chosen: int,
        normalize: bool,
        shared: MLP | None,
        shared_gate: Linear | None,
    ) -> None:
        self.router, self.experts = router, tuple(experts)
        self.shared, self.shared_gate = shared, shared_gate
        self._num_chosen, self._normalize = num_chosen, normalize

    def __call__(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        weights, chosen = route(self.router(x), self._num_chosen, self._normalize)
        places = chosen.view(-1)
        order = places.argsort(stable=True)  # (T k,), places sorted by expert
        counts = places.bincount(minlength=len(self.experts)).tolist()
        tokens, scales = order // self._num_chosen, weights.view(-1)[order].to(x.dtype).unsqueeze(1)
        output = torch.zeros_like(x) if self.shared is None else self._shared(x)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                output.index_add_(0, rows, expert(x[rows]) * scales[start : start + count])
                start += count
        return output

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        output = self.shared(x)
        return output if self.shared_gate is None else output * self.shared_gate(x).sigmoid()
