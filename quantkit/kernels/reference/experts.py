"""Mixture of experts: choice of experts per token, and their combined output. Any device.

Experts run one after another, each on the tokens that chose it; the host reads how many tokens chose each expert.
Shapes: T tokens, H hidden width, E experts, k of them for each token.
Source: Shazeer et al. 2017, Outrageously Large Neural Networks; Jiang et al. 2024 (Mixtral).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.models.description import ExpertsShape


def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts for each token and return their weights.

    Args:
        scores: (T, E) router logits, any float dtype.
        num_chosen: k.
        normalize: whether the chosen experts' weights are scaled to sum to one.
    Returns:
        weights: (T, k) float32.
        chosen: (T, k) int64.
    """
    weights, chosen = scores.float().softmax(dim=-1).topk(num_chosen, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def choose_experts(
    scores: Tensor, experts: ExpertsShape, balance: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts as the DeepSeek models do: with a balance term, within the best groups, and with scaled weights.

    Args:
        scores: (T, E) router logits, any float dtype.
        experts: settings of the choice.
        balance: (E,) float32, added to the scores for the choice, but not for the weights; None = nothing is added.
        chosen: (T, k) int64, if already chosen, e.g. by token id in DeepSeek-V4; None = choose the best.
    Returns:
        weights: (T, k) float32.
        chosen: (T, k) int64.
    Source: DeepSeek-AI 2024: DeepSeek-V2 ranks a group by its best expert; DeepSeek-V3 (sigmoid, balance) by the sum of
        its best two.
    """
    single = scores.float()
    likely = _SCORING[experts.scoring](single)
    preferences = likely if balance is None else likely + balance
    if experts.num_groups > 1:
        by_group = preferences.view(len(scores), experts.num_groups, -1)  # (T, G, E / G)
        best = by_group.topk(1 if experts.group_rule == "best" else 2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(experts.chosen_groups, dim=-1).indices, 1.0)
        # DeepSeek-V2 fills with zeros. The result is the same, because softmax gives no preferences below zero.
        preferences = by_group.masked_fill(kept.unsqueeze(-1) == 0, -torch.inf).flatten(1)
    chosen = preferences.topk(experts.num_chosen, dim=-1).indices if chosen is None else chosen
    weights = likely.gather(1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * experts.scale, chosen


_SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda scores: F.softplus(scores).sqrt(),
}


def run_each(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], output: Tensor
) -> Tensor:
    """Add the weighted outputs of each token's experts; each expert runs once per batch.

    Args:
        x: (T, H); not modified.
        chosen: (T, k) int64, k different experts per token.
        weights: (T, k) float32, factors on the experts' outputs.
        experts: E modules (n, H) -> (n, H).
        output: (T, H) to add to; modified.
    Returns:
        `output`.
    """
    pairs, num_chosen = chosen.view(-1), chosen.shape[1]  # a pair is a token with one of its experts
    order = pairs.argsort(stable=True)  # (T k,), pairs sorted by expert
    counts = pairs.bincount(minlength=len(experts)).tolist()
    tokens, scales = order // num_chosen, weights.view(-1)[order].to(x.dtype).unsqueeze(1)
    start = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            rows = tokens[start : start + count]
            output.index_add_(0, rows, expert(x[rows]) * scales[start : start + count])
            start += count
    return output
