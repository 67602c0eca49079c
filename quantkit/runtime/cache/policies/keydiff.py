"""Keep tokens whose keys point in a different direction from most keys. Source: Park et al. 2025, KeyDiff: Key
Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments."""

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from quantkit.runtime.cache.policies import Policy


class KeyDiff(Policy):
    """Keep the tokens whose keys differ most from the mean key."""

    judges_sinks = True  # in heads that need the first tokens, their keys differ from all others

    def scores(self, keys: Tensor) -> Tensor:
        """Score each head's keys by their distance from the head's mean key, plus this distance averaged over heads."""
        usual = normalize(keys, dim=-1).mean(dim=1, keepdim=True)
        own = -cosine_similarity(keys, usual, dim=-1)
        return own + own.mean(0)  # a token that stands out in one head is kept longer by the others too


POLICY = KeyDiff()
