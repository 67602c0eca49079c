"""Mixture of experts in place of the MLP: a router chooses k experts per token and sums their weighted outputs.

`reference.experts` defines the computation. Shapes: T tokens, H hidden width, E experts, k experts chosen per token.
Source: Shazeer et al. 2017, Outrageously Large Neural Networks; Jiang et al. 2024 (Mixtral); Yang et al. 2024 (Qwen2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.kernels.reference.experts import run_each
from quantkit.kernels.types import Linear, LinearFacts, StackedExperts
from quantkit.runtime.model.layers import MLP


@dataclass(kw_only=True, slots=True, eq=False)
class Mixture:
    """Experts of one layer.

    Args:
        router: linear (T, H) -> (T, E) that computes the scores of the experts.
        experts: one MLP per expert, or all experts as one module.
        choose: function such as `route` that maps scores (T, E) to weights and indices of the chosen experts.
        shared: an MLP applied to every token, or None.
        shared_gate: linear (T, H) -> (T, 1). The sigmoid of its output is the factor on the output of `shared`.
            None = no factor.
        table: (V, k) int64, the experts of each token id; `choose` then computes only their weights. None = `choose`
            also chooses the experts.
    """

    router: Linear
    experts: tuple[MLP, ...] | StackedExperts
    choose: Callable[..., tuple[Tensor, Tensor]]
    shared: MLP | None
    shared_gate: Linear | None
    table: Tensor | None = None

    @property
    def linears(self) -> tuple[LinearFacts, ...]:
        """The linears of the experts, two per expert, without those of the shared expert."""
        if isinstance(self.experts, tuple):
            return tuple(linear for expert in self.experts for linear in (expert.up, expert.down))
        return self.experts.linears

    @property
    def is_capturable(self) -> bool:
        """Whether calls can be captured as a CUDA graph: only if the device chooses the experts."""
        return not isinstance(self.experts, tuple)

    def __call__(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Compute (T, H) -> (T, H); only `table` needs the token ids (T,)."""
        choose = self.choose
        if self.table is not None and token_ids is not None:
            choose = partial(choose, chosen=self.table[token_ids])
        shared = None if self.shared is None else self.shared(x)
        score = None if self.shared_gate is None else self.shared_gate(x)
        if not isinstance(self.experts, tuple):
            return self.experts(x, self.router(x), shared, score, choose)
        if shared is not None and score is not None:
            shared = shared * score.sigmoid()
        weights, chosen = choose(self.router(x))
        return run_each(x, chosen, weights, self.experts, torch.zeros_like(x) if shared is None else shared)
