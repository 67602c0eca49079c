"""Keep the first and the newest tokens. Source: Xiao et al. 2023, Efficient Streaming Language Models."""

import torch
from torch import Tensor

from quantkit.runtime.cache.policies import Policy


class NewestTokens(Policy):
    """Keep the newest tokens; whole pages are evicted, so no key is read."""

    reads_keys = False

    def scores(self, keys: Tensor) -> Tensor:
        """Score tokens by their position in the text."""
        return torch.arange(keys.shape[1], device=keys.device).expand(keys.shape[:2])


POLICY = NewestTokens()
