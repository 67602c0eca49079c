"""What a policy sees of a sequence: each head of each layer chooses its own tokens.

Shapes: N tokens, Hkv heads of keys, Hq of queries, D channels, W newest queries.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quantkit.models.kv_budget import SINK_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKeys:
    """What one layer has of a sequence.

    Args:
        keys: (Hkv, N, D) float32, as attention reads them: rotated, and rounded where the cache is quantized. Those of
            the newest tokens are in the order of the text.
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
        scores: of each head's tokens in a layer, (Hkv, N); larger ones are kept longer. None = older pages go first,
            and nothing is read or moved.
        observed: newest queries that it asks for.
        sinks: tokens at the beginning that it does not judge.
    """

    scores: Callable[[LayerKeys], Tensor] | None
    observed: int = 0
    sinks: int = SINK_TOKENS
