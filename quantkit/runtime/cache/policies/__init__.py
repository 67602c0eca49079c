"""Policies that choose which tokens of a sequence leave a full KV cache: one file each, named as in `--kv-policy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from quantkit.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

REGISTRY = Registry(package=__name__, attribute="POLICY", noun="eviction policy")

DEFAULT = "keydiff"
"""Policy of a budget that names none: it finds facts again that `window` has lost, see the table of docs/runtime.md."""


class Policy(ABC):
    """A rule that ranks the tokens of a sequence. A file defines one instance, called `POLICY`.

    Attributes:
        reads_keys: whether `scores` is called; if not, the oldest pages go and nothing is read or moved.
        judges_sinks: whether it judges the first tokens too, which stay otherwise.
    """

    reads_keys: ClassVar[bool] = True
    judges_sinks: ClassVar[bool] = False

    @abstractmethod
    def scores(self, keys: Tensor) -> Tensor:
        """Score the tokens of one layer; tokens with larger scores stay longer.

        Args:
            keys: (Hkv, N, D) float32, of Hkv heads, N tokens and D channels, as attention reads them: rotated, and
                rounded where the cache is quantized. Keys of the newest tokens are in the order of the text.
        Returns:
            (Hkv, N).
        """
