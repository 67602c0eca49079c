"""One run of a decoder layer with every module watched: what went in, what came out, in which order.

For `discover` only: inputs are copied, so the hidden states must be few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# What turns the outputs of a linear into weights of something else: a router's choice, not features.
_CHOICES = ("aten::topk", "aten::softmax", "aten::_softmax")  # which softmax is seen depends on gradients
_SQUASHED = ("aten::sigmoid",)


@dataclass(kw_only=True, slots=True)
class Seen:
    """What one module did in one run.

    Args:
        order: place of its first call among the calls of all modules.
        rows: what it was called with, all calls in one, (T, K); None when that was no tensor.
        output: what came out of its last call, shape kept; None when that was no tensor.
    """

    order: int
    rows: Tensor | None = None
    output: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class Recording:
    """What all modules did in one run.

    Args:
        modules: by relative name, in the order of their first calls; those that were not called are missing.
        choices: tensors of which the largest were chosen, or that were made to sum to one, each (T, N).
        squashed: tensors that went through a sigmoid, likewise.
    """

    modules: dict[str, Seen] = field(default_factory=dict)
    choices: list[Tensor] = field(default_factory=list)
    squashed: list[Tensor] = field(default_factory=list)


def record_inputs(block: nn.Module, run: Callable[[], object]) -> Recording:
    """Run a layer and watch it.

    Args:
        block: the layer; not modified.
        run: calls it once.
    """
    recording = Recording()
    handles = []
    for name, module in block.named_modules():
        handles.append(module.register_forward_pre_hook(_before(recording, name), with_kwargs=True))
        handles.append(module.register_forward_hook(_after(recording, name)))
    try:
        with _Choices(recording):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return recording


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a tensor, tuple, list or dict."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((item for item in items if isinstance(item, Tensor)), None)


def _before(recording: Recording, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen = recording.modules.setdefault(name, Seen(order=len(recording.modules)))
        given = first_tensor(args)
        if given is None:
            given = first_tensor(kwargs)
        if given is not None and given.dim() and given.is_floating_point():
            rows = given.detach().reshape(-1, given.shape[-1]).clone()  # a copy: it may be changed in place later
            same = seen.rows is not None and seen.rows.shape[1] == rows.shape[1]
            seen.rows = torch.cat([seen.rows, rows]) if same and seen.rows is not None else rows

    return hook


def _after(recording: Recording, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        made = first_tensor(output)
        if made is not None and made.is_floating_point():
            recording.modules[name].output = made.detach().clone()

    return hook


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what softmax, topk and sigmoid are given, while open."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = {
            **dict.fromkeys(_CHOICES, recording.choices),
            **dict.fromkeys(_SQUASHED, recording.squashed),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = self._found.get(func._schema.name)
        if found is not None and isinstance(args[0], Tensor) and args[0].dim():
            found.append(args[0].detach().reshape(-1, args[0].shape[-1]).float().clone())
        return func(*args, **(kwargs or {}))
