"""Keys with a small norm stay: queries meet them more often. Source: Devoto et al. 2024, A Simple and Effective L2
Norm-Based Strategy for KV Cache Compression."""

import torch
from torch import Tensor

from quantkit.runtime.cache.policies.base import LayerKeys, Policy


def _scores(layer: LayerKeys) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(layer.keys, dim=-1)
    return -norms


POLICY = Policy(scores=_scores)
