"""Policies that choose which tokens a sequence over its KV budget evicts: one file per value of `--kv-policy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from quantkit.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

REGISTRY = Registry(package=__name__, attribute="POLICY", noun="eviction policy")

DEFAULT = "keydiff"
"""Policy to use if the settings name none. In the tests of docs/runtime.md, it keeps facts that `window` loses."""


class Policy(ABC):
    """A rule that ranks the tokens of a sequence. Each file defines one instance named `POLICY`.

    Attributes:
        reads_keys: whether eviction calls `scores`. If not, the oldest pages after the attention sinks are evicted, and
            no key is read or moved.
        judges_sinks: whether the policy may also evict the first tokens (attention sinks); otherwise they always stay.
    """

    reads_keys: ClassVar[bool] = True
    judges_sinks: ClassVar[bool] = False

    @abstractmethod
    def scores(self, keys: Tensor) -> Tensor:
        """Score the tokens of one layer; tokens with higher scores are kept longer.

        Args:
            keys: (Hkv, N, D) float32: Hkv heads, N tokens, D channels. Keys are as attention reads them: rotated, and
                rounded if the cache is quantized. The newest tokens are in text order.
        Returns:
            (Hkv, N) scores.
        """
