"""A mixture of experts in place of the MLP: a router chooses a few for each token, their outputs are weighed and added.

What is computed, and by which kernels, is in `reference.experts`. Shapes: T tokens, H hidden width, E experts, k of
them for each token.
Source: Shazeer et al. 2017, Outrageously Large Neural Networks; Jiang et al. 2024 (Mixtral); Yang et al. 2024 (Qwen2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.kernels.reference.experts import route, run_each
from quantkit.kernels.types import Linear, LinearFacts, StackedExperts
from quantkit.runtime.model.layers import MLP


class Mixture:
    """Experts of one layer.

    Args:
        router: (T, H) -> (T, E).
        experts: one MLP each, or all of them as one, which has its own way to choose.
        num_chosen, normalize: see `route`; of no meaning for experts that are one.
        shared: an MLP that every token passes, or None.
        shared_gate: (T, H) -> (T, 1), weighs its output through a sigmoid; None = it counts fully.
    """

    def __init__(
        self,
        *,
        router: Linear,
        experts: Sequence[MLP] | StackedExperts,
        num_chosen: int,
        normalize: bool,
        shared: MLP | None,
        shared_gate: Linear | None,
    ) -> None:
        self.router = router
        self._each: tuple[MLP, ...] = tuple(experts) if isinstance(experts, Sequence) else ()
        self._stacked = None if isinstance(experts, Sequence) else experts
        self.shared, self.shared_gate = shared, shared_gate
        self._num_chosen, self._normalize = num_chosen, normalize

    @property
    def linears(self) -> tuple[Linear | LinearFacts, ...]:
        """Two of each expert, without the shared one's."""
        if self._stacked is not None:
            return self._stacked.linears
        return tuple(linear for expert in self._each for linear in (expert.up, expert.down))

    @property
    def is_capturable(self) -> bool:
        """Whether the device chooses, so that calls can be captured as a graph."""
        return self._stacked is not None

    def __call__(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        if self._stacked is not None:
            shared = None if self.shared is None else self.shared(x)
            score = None if self.shared_gate is None else self.shared_gate(x)
            return self._stacked(x, self.router(x), shared, score)
        weights, chosen = route(self.router(x), self._num_chosen, self._normalize)
        return run_each(x, chosen, weights, self._each, torch.zeros_like(x) if self.shared is None else self._shared(x))

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        output = self.shared(x)
        return output if self.shared_gate is None else output * self.shared_gate(x).sigmoid()
