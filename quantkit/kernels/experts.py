"""A mixture of experts: which are chosen for a token, and what those compute together.

`route` and `run_each` are the reference, on any device: each expert multiplies the tokens that chose it, one expert
after another, and how many those are is asked by the host. Where `stack` applies, Triton's kernels do all of it
without asking (`triton.experts`). Shapes: T tokens, H hidden width, I width of an expert, E experts, k of them for
each token.
Source: Shazeer et al. 2017, Outrageously Large Neural Networks; Jiang et al. 2024 (Mixtral).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.linear import ExpertLinear, Linear


class Stacked(Protocol):
    """All experts of a layer as one; nothing is asked by the host, so that calls can be captured as a graph.

    Attributes:
        linears: what was stacked, two of each expert.
    """

    linears: tuple[ExpertLinear, ...]

    def __call__(self, x: Tensor, scores: Tensor, shared: Tensor | None, shared_score: Tensor | None) -> Tensor:
        """What `route` and `run_each` compute.

        Args:
            x: (T, H); not modified.
            scores: (T, E) router logits.
            shared: (T, H) is added to the result; None = nothing is.
            shared_score: (T, 1), weighs `shared` through a sigmoid; None = it counts fully.
        Returns:
            (T, H), dtype of x.
        """
        ...


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


def run_each(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], output: Tensor
) -> Tensor:
    """Add the weighed outputs of each token's experts; each expert multiplies once, whatever the batch.

    Args:
        x: (T, H); not modified.
        chosen: (T, k) int64, k different experts of each token.
        weights: (T, k) float32, how much each counts.
        experts: E of (n, H) -> (n, H).
        output: (T, H) that they are added to; modified.
    Returns:
        output.
    """
    places, num_chosen = chosen.view(-1), chosen.shape[1]
    order = places.argsort(stable=True)  # (T k,), places sorted by expert
    counts = places.bincount(minlength=len(experts)).tolist()
    tokens, scales = order // num_chosen, weights.view(-1)[order].to(x.dtype).unsqueeze(1)
    start = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            rows = tokens[start : start + count]
            output.index_add_(0, rows, expert(x[rows]) * scales[start : start + count])
            start += count
    return output


def can_stack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether experts on this device are for Triton's kernels, if they are stored in a way that those take."""
    return gpu.is_used(device) and dtype in (torch.bfloat16, torch.float16)


def stack(
    experts: Iterable[tuple[Linear, Linear]], *, count: int, activation: str, num_chosen: int, normalize: bool
) -> Stacked | str:
    """Lay the experts of a layer out as one.

    Args:
        experts: gate with up, and down, of each; one that has been asked for is not needed any more.
        count: E.
        activation: of the gate.
        num_chosen, normalize: see `route`.
    Returns:
        the experts; or why they must be run one by one.
    """
    from quantkit.kernels.gpu import experts as on_gpu

    return on_gpu.stack(experts, count=count, activation=activation, num_chosen=num_chosen, normalize=normalize)
