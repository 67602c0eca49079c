"""Run a decoder layer once, and find the linears that read the same tensor and the linears that must stay unquantized.

The run records the inputs and outputs of every module. Inputs are copied, so run the layer on few tokens. Inputs are
compared by value: tensors that are equal on random inputs count as the same. An expert reads only some rows of the
router's input, but both count as reading the same tensor.
Three kinds of linears stay unquantized: linears that were not called; gates, which have at most as many outputs as the
model has attention heads; and routers, whose outputs go directly into a softmax or top-k, or into a sigmoid if there
are as many outputs as experts.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.compress.calibration.expert_inputs import hook_modules, removed_after

NOT_CALLED = "not called"
_EXPERT = re.compile(r"\.\d+(?=\.)")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Gates:
    """Numbers of outputs by which gates and routers are recognized.

    Args:
        most: the model's number of attention heads. A linear with at most this many outputs is a gate.
        experts: numbers of experts in the config. A linear with one of these numbers of outputs is a router if its
            outputs go through a sigmoid.
    """

    most: int
    experts: frozenset[int] = frozenset()


@dataclass(kw_only=True, slots=True)
class Draft:
    """A set of linears that read the same tensor, before its source is known.

    Args:
        linears: relative names in execution order.
        rows: the tensor that they read, (T, K).
        order: position of the first linear's first call among the calls of all modules.
        beside: other modules with a weight (N, K) that read the same input.
    """

    linears: list[str]
    rows: Tensor
    order: int
    beside: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        """Return the names without expert numbers, as a key that is equal for the same linears of every expert."""
        return tuple(sorted({template(name) for name in self.linears}))


def template(name: str) -> str:
    """Return a name with `*` in place of each expert's number; the last part of a name never counts as a number."""
    return _EXPERT.sub(".*", name)


def draft_sets(block: nn.Module, seen: Recording, gates: Gates) -> tuple[list[Draft], dict[str, str]]:
    """Return the sets of linears that read the same tensor, in execution order. Also return why linears must stay
    unquantized, as reasons keyed by the linear's name.

    Args:
        block: the layer.
        seen: record of one run of its modules.
        gates: rule that recognizes gates and routers.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    alone = {name: reason for name, module in linears.items() if (reason := _ignored(name, module, seen, gates))}
    called = sorted((name for name in linears if name not in alone), key=lambda name: seen.modules[name].order)
    drafts: list[Draft] = []
    for name in called:
        rows = seen.modules[name].rows
        assert rows is not None
        rows = _whole_input(seen, name, called, rows)
        alike = next((draft for draft in drafts if same(draft.rows, rows)), None)
        if alike is None:
            drafts.append(Draft(linears=[name], rows=rows, order=seen.modules[name].order))
        else:
            alike.linears.append(name)
    _add_unseen_experts(linears, drafts, alone)
    for draft in drafts:
        draft.beside = [name for name in _readers(block, seen, draft.rows) if name not in draft.linears]
    return drafts, alone


def same(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two tensors hold the same rows, however they are batched."""
    if left is None or right is None or not left.dim() or not left.numel() or left.numel() != right.numel():
        return False
    return left.shape[-1] == right.shape[-1] and torch.equal(left.reshape(right.shape), right)


def _ignored(name: str, module: nn.Linear, seen: Recording, gates: Gates) -> str | None:
    calls = seen.modules.get(name)
    if calls is None or calls.rows is None or not calls.rows.shape[0]:
        return NOT_CALLED
    outputs = module.weight.shape[0]
    if outputs <= gates.most:
        return f"a gate (number of outputs: {outputs})"
    weighs = [*seen.choices, *(seen.squashed if outputs in gates.experts else ())]
    if any(same(given, None if calls.output is None else calls.output.float()) for given in weighs):
        return "a router: its outputs go into a softmax, top-k or sigmoid"
    return None


def _whole_input(seen: Recording, name: str, called: Iterable[str], rows: Tensor) -> Tensor:
    """Return the tensor from which an expert's linear reads some rows: the input of the last module before the experts
    whose input contains all rows that any expert reads. If there is no such module, or if the linear is in no expert,
    return `rows`, the linear's recorded input.
    """
    alike = [other for other in called if template(other) == template(name)]
    if len(alike) < 2:
        return rows
    before = [what for what in seen.modules.values() if what.order < seen.modules[alike[0]].order]
    for what in sorted(before, key=lambda what: what.order, reverse=True):
        if what.rows is not None and what.rows.shape[1] == rows.shape[1]:
            known = set(_row_bytes(what.rows))
            if all(known.issuperset(_row_bytes(seen.modules[other].rows)) for other in alike):
                return what.rows
    return rows


def _row_bytes(rows: Tensor | None) -> list[bytes]:
    return [] if rows is None else [row.numpy().tobytes() for row in rows.float().cpu()]


def _add_unseen_experts(linears: dict[str, nn.Linear], drafts: list[Draft], alone: dict[str, str]) -> None:
    """Put the linears of experts that got no token in the run into sets, in the same way as those of experts that got
    tokens. Remove them from `alone`, the ignored linears.
    """
    added: dict[tuple[str, tuple[str, ...]], Draft] = {}
    for name in [name for name, reason in alone.items() if reason == NOT_CALLED and template(name) != name]:
        like = next((draft for draft in drafts if template(name) in draft.key), None)
        if like is None:
            continue
        del alone[name]
        # The set holds the linears of all experts. If only one expert was called, it saw every token, so the set also
        # holds linears outside the experts.
        if sum(template(other) == template(name) for other in like.linears) > 1 or any(
            template(n) == n for n in like.linears
        ):
            like.linears.append(name)
            continue
        key = (expert(name), like.key)
        empty = like.rows.new_zeros(0, linears[name].weight.shape[1])
        added.setdefault(key, Draft(linears=[], rows=empty, order=like.order)).linears.append(name)
    drafts += added.values()


def expert(name: str) -> str:
    """Return a name up to and including the expert's number; the whole name if it has none."""
    number = _EXPERT.search(name)
    return name[: number.end()] if number else name


def _readers(block: nn.Module, seen: Recording, rows: Tensor) -> list[str]:
    """Return the names of the modules that have a weight (N, K) and read exactly these rows."""
    weights = {name: module._parameters.get("weight") for name, module in block.named_modules()}
    return [
        name
        for name, what in seen.modules.items()
        if (w := weights[name]) is not None and w.dim() == 2 and w.shape[1] == rows.shape[-1] and same(what.rows, rows)
    ]
