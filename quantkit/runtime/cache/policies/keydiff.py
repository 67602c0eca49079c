"""Keys that point elsewhere than the others stay. Source: Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache
Eviction for Long-Context LLM Inference in Resource-Constrained Environments."""

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from quantkit.runtime.cache.policies.base import LayerKeys, Policy


def _scores(layer: LayerKeys) -> Tensor:
    usual = normalize(layer.keys, dim=-1).mean(dim=1, keepdim=True)
    own = -cosine_similarity(layer.keys, usual, dim=-1)
    return own + own.mean(0)  # what one head finds by a key, others are to find too


POLICY = Policy(scores=_scores, sinks=0)  # heads that need them have keys there like no others
