"""A mixture of experts in place of the MLP: a router chooses a few for each token, their outputs are weighed and added.

What is computed, and by which kernels, is in `reference.experts`. Shapes: T tokens, H hidden width, E experts, k of
them for each token.
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
        router: (T, H) -> (T, E).
        experts: one MLP each, or all of them as one.
        choose: (T, E) scores to weights and numbers of the chosen, such as `route`.
        shared: an MLP that every token passes, or None.
        shared_gate: (T, H) -> (T, 1), weighs its output through a sigmoid; None = it counts fully.
        table: (V, k) int64, experts of each token id, which `choose` then only weighs; None = it chooses.
    """

    router: Linear
    experts: tuple[MLP, ...] | StackedExperts
    choose: Callable[..., tuple[Tensor, Tensor]]
    shared: MLP | None
    shared_gate: Linear | None
    table: Tensor | None = None

    @property
    def linears(self) -> tuple[LinearFacts, ...]:
        """Two of each expert, without the shared one's."""
        if isinstance(self.experts, tuple):
            return tuple(linear for expert in self.experts for linear in (expert.up, expert.down))
        return self.experts.linears

    @property
    def is_capturable(self) -> bool:
        """Whether the device chooses, so that calls can be captured as a graph."""
        return not isinstance(self.experts, tuple)

    def __call__(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """(T, H) -> (T, H), of tokens with these ids (T,), which only a table asks for."""
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
