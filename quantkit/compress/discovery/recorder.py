"""Record one run of a decoder layer: the inputs and outputs of every module, in the order of the calls.

Only discovery uses this module. Inputs are copied, so run the layer on few tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.compress.calibration.expert_inputs import hook_modules, removed_after

# Operations with which a router turns the outputs of a linear into weights of experts.
_CHOICES = ("aten::topk", "aten::softmax", "aten::_softmax")  # either softmax may run
_SQUASHED = ("aten::sigmoid",)


@dataclass(kw_only=True, slots=True)
class Seen:
    """Inputs and outputs of one module in one run.

    Args:
        order: number of modules that were called before the first call of this module.
        rows: inputs of all calls of the module together, (T, K); None = no input was a floating-point tensor.
        output: output of the last call, in its own shape; None = no output was a floating-point tensor.
    """

    order: int
    rows: Tensor | None = None
    output: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class Recording:
    """Records of all modules in one run.

    Args:
        modules: records of the called modules, keyed by relative name, in the order of the first calls.
        choices: inputs of softmax and top-k, each (T, N).
        squashed: inputs of sigmoids, each (T, N).
    """

    modules: dict[str, Seen] = field(default_factory=dict)
    choices: list[Tensor] = field(default_factory=list)
    squashed: list[Tensor] = field(default_factory=list)


def record_inputs(block: nn.Module, run: Callable[[], object]) -> Recording:
    """Run a layer and record its modules.

    Args:
        block: the layer; not modified.
        run: calls the layer once.
    """
    recording = Recording()
    modules = dict(block.named_modules())
    handles = hook_modules(block, list(modules), partial(_enter, recording))
    handles += [module.register_forward_hook(partial(_leave, recording, name)) for name, module in modules.items()]
    with removed_after(handles), _Choices(recording):
        run()
    return recording


def _first_tensor(value: Any) -> Tensor | None:
    """Return a value itself if it is a tensor, or the first tensor in a tuple, list or dict; None if there is none."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((item for item in items if isinstance(item, Tensor)), None)


def _enter(recording: Recording, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen = recording.modules.setdefault(name, Seen(order=len(recording.modules)))
    given = _first_tensor((*args, *kwargs.values()))
    if given is not None and given.dim() and given.is_floating_point():
        rows = given.detach().reshape(-1, given.shape[-1]).clone()  # a copy: it may be changed in place later
        if seen.rows is not None and seen.rows.shape[1] == rows.shape[1]:
            rows = torch.cat([seen.rows, rows])
        seen.rows = rows


def _leave(recording: Recording, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    result = _first_tensor(output)
    if result is not None and result.is_floating_point():
        recording.modules[name].output = result.detach().clone()


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, record the inputs of softmax, topk and sigmoid."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = {**dict.fromkeys(_CHOICES, recording.choices), **dict.fromkeys(_SQUASHED, recording.squashed)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kept = self._kept.get(func._schema.name)
        if kept is not None and isinstance(args[0], Tensor) and args[0].dim():
            kept.append(args[0].detach().reshape(-1, args[0].shape[-1]).float().clone())
        return func(*args, **(kwargs or {}))
