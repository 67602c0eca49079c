"""What a policy sees of a sequence, and how scores of tokens become scores of pages.

All heads of all layers share one page table, so a page stays or goes for all of them: each gives its tokens a score,
and these are made comparable and added up. Shapes: P complete pages, S tokens each, Hkv heads of keys, Hq of queries,
D channels, W newest queries.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKeys:
    """What one layer has of a sequence.

    Args:
        keys: (Hkv, P, S, D) float32, as attention reads them: rotated, and rounded where the cache is quantized.
        queries: (W, Hq, D) float32, of the newest tokens; None unless the policy observes them.
        scale: of their products.
    """

    keys: Tensor
    queries: Tensor | None
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A policy.

    Args:
        scores: of each head's tokens in a layer, (Hkv, P, S); larger ones are kept longer. None = older pages go first,
            and nothing is read.
        observed: newest queries that it asks for.
    """

    scores: Callable[[LayerKeys], Tensor] | None
    observed: int = 0

    def page_scores(self, layers: Iterable[LayerKeys]) -> Tensor:
        """(P,): of each page the mean over all heads of how far its best token is above the head's average."""
        assert self.scores is not None, "pages in order of age have no scores"
        totals = []
        for layer in layers:
            scores = self.scores(layer)
            flat = scores.flatten(1)
            # In units of the head's own spread, as one head's scores may all be small.
            mean, spread = flat.mean(1, keepdim=True), flat.std(1, keepdim=True).clamp_min(1e-12)
            totals.append(((scores.amax(2) - mean) / spread).mean(0))
        return torch.stack(totals).mean(0)
