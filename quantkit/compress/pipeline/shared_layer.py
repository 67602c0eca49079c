"""A layer that several recipes are tried on: what they ask of its inputs is gathered once.

Only as long as it is as it was read: what its linears are fed depends on what has been done to it since.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import CrossGram, Observer


@dataclass(kw_only=True, slots=True)
class SharedLayer(LayerContext):
    """A layer of one of several runs that feed it the same.

    Args:
        shared: what has been gathered for one of them, by what was asked for; added to.
    """

    shared: dict[object, Any]

    def count_tokens(self) -> None:
        """Count tokens as `LayerContext.count_tokens` does."""
        if self.chosen.quantized:
            LayerContext.count_tokens(self)
            return
        said = len(self.chosen.notes)
        if "tokens" not in self.shared:
            LayerContext.count_tokens(self)
            self.shared["tokens"] = self.data.tokens_per_expert, self.chosen.notes[said:]
        self.data.tokens_per_expert, notes = self.shared["tokens"]
        self.chosen.notes[said:] = notes

    def observe(self, observers: Mapping[str, Observer], errors: Mapping[str, CrossGram] | None = None) -> None:
        """Observe inputs as `LayerContext.observe` does."""
        if errors or self.chosen.quantized or self.data.divisors:
            LayerContext.observe(self, observers, errors or {})
            return
        asked = _form(dict(observers))
        if asked not in self.shared:
            LayerContext.observe(self, observers)
            self.shared[asked] = copy.deepcopy(dict(observers))
            return
        # Copies: who has asked works in what it was given.
        seen = copy.deepcopy(self.shared[asked])
        for name, observer in observers.items():
            vars(observer).update(vars(seen[name]))


def _form(value: object) -> object:
    """Key that tells apart observers that have seen nothing: their types, sizes and options."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((name, _form(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return (type(value), _form(vars(value))) if hasattr(value, "__dict__") else repr(value)
