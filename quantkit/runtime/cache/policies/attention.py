"""Tokens that any of the newest queries attends to stay. Source: Li et al. 2024, SnapKV: LLM Knows What You Are Looking
for Before Generation, which takes the mean of the queries; one fact may be asked for by one of them."""

from torch import Tensor
from torch.nn.functional import avg_pool1d

from quantkit.models.kv_budget import OBSERVED_TOKENS
from quantkit.runtime.cache.policies.base import LayerKeys, Policy

_POOL = 5  # neighbouring tokens share their attention, so that a fact is kept with what is around it


def _scores(layer: LayerKeys) -> Tensor:
    assert layer.queries is not None, "nothing was observed"
    heads, width = len(layer.keys), layer.keys.shape[2]
    queries = layer.queries.view(len(layer.queries), heads, -1, width).permute(1, 2, 0, 3).reshape(heads, -1, width)
    weights = (queries @ layer.keys.transpose(1, 2) * layer.scale).softmax(-1)  # (Hkv, G * W, N)
    return avg_pool1d(weights.amax(1), _POOL, stride=1, padding=_POOL // 2)


POLICY = Policy(scores=_scores, observed=OBSERVED_TOKENS["attention"])
