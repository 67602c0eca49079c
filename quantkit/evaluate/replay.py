"""What enters a layer, kept from one measurement to the next: those that differ only from there on start there.

Measurements of one group after another share all layers before it, half of the work on average. Only for models that
run natively on a CPU; others are run in full.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from quantkit.evaluate.fused_groups import FusedGroup
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.model import NativeModel

States = list[tuple[Tensor, Tensor | None]]  # what enters a block at each step of the engine
Forms = tuple[tuple[FusedGroup, ...], ...]  # the groups of each layer that are not the original's


class Replay:
    """The layers that measurements of a model have in common, run once. *Mutable*.

    Args:
        llm: asked the same in every measurement.
    """

    def __init__(self, llm: LLM) -> None:
        self._model = llm.model if isinstance(llm.model, NativeModel) and llm.model.device.type == "cpu" else None
        self._last: Forms | None = None
        self._kept: Forms = ()  # of the layers before the one that `_states` enter
        self._states: States = []

    @contextmanager
    def start(self, groups: Sequence[FusedGroup]) -> Iterator[None]:
        """While open, one measurement runs what it does not share with the one before.

        Args:
            groups: those that are swapped in it.
        """
        if self._model is None:
            yield
            return
        blocks = self._model.blocks
        forms = tuple(tuple(group for group in groups if group.layer == index) for index in range(len(blocks)))
        first = len(self._kept) if _same(self._kept, forms) else 0
        # Where this measurement parts from the last, the next one will part from it, or later.
        parting = _shared(self._last, forms)
        recorded: States = []
        running: list[Any] = [_Replayed(self._states), *blocks[first:]] if first else list(blocks)
        if first < parting < len(blocks):
            running.insert(len(running) - (len(blocks) - parting), _Recorded(recorded))
        try:
            self._model.blocks = running
            yield
        finally:
            self._model.blocks = blocks
        self._last = forms
        if recorded:
            self._kept, self._states = forms[:parting], recorded


def _same(kept: Forms, forms: Forms) -> bool:
    return _shared(kept, forms) == len(kept)


def _shared(one: Forms | None, other: Forms) -> int:
    """Layers at the beginning that have the very same groups."""
    pairs = enumerate(zip(one or (), other, strict=False))
    return next((i for i, (a, b) in pairs if list(map(id, a)) != list(map(id, b))), len(one or ()))


class _Recorded:
    """A block that keeps what passes."""

    rope = None

    def __init__(self, states: States) -> None:
        self._states = states

    def __call__(self, x: Tensor, pending: Tensor | None, *_: Any) -> tuple[Tensor, Tensor | None]:
        self._states.append(_copied(x, pending))
        return x, pending


class _Replayed:
    """A block that gives what has been kept in place of what comes."""

    rope = None

    def __init__(self, states: States) -> None:
        self._left = iter(states)

    def __call__(self, *_: Any) -> tuple[Tensor, Tensor | None]:
        return _copied(*next(self._left))


def _copied(x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor | None]:
    # Kernels may write into what they are given.
    return x.clone(), None if pending is None else pending.clone()
