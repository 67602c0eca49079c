"""Linears of one decoder layer that read the same tensor, and linears to ignore, seen in one run of it.

Ignored are linears that were not called, that have no more outputs than the model has heads (gates), or whose
outputs go straight into a softmax or a choice of the largest, or into a sigmoid if there are as many as experts
(routers). Inputs are compared as numbers: what is
equal on random inputs is the same tensor. Experts read rows of what their router reads, which counts as the same.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.compress.discovery.recorder import Recording

NOT_CALLED = "not called"
_EXPERT = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gates:
    """Rule that recognizes gates and routers by the number of their outputs alone.

    Args:
        most: at most this many, the model's attention heads: a gate.
        experts: numbers of experts; exactly as many and put through a sigmoid: a router.
    """

    most: int
    experts: frozenset[int] = frozenset()


@dataclass(kw_only=True, slots=True)
class Draft:
    """Linears that read the same tensor.

    Args:
        linears: relative names in running order.
        rows: what they read, (T, K).
        order: place of the first call.
        beside: other modules with a weight (N, K) that read the same.
    """

    linears: list[str]
    rows: Tensor
    order: int
    beside: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        """The names without numbers of experts: alike for the same linears of every expert."""
        return tuple(sorted({template(name) for name in self.linears}))


def template(name: str) -> str:
    """A name with `.*` in place of an expert's index; the last part of a name is never taken for one."""
    return _EXPERT.sub(".*", name)


def draft_sets(block: nn.Module, seen: Recording, gates: Gates) -> tuple[list[Draft], dict[str, str]]:
    """Sets of linears in running order, and why the others are ignored.

    Args:
        block: the layer.
        seen: what its modules did in one run.
        gates: which linears are no features by the number of their outputs.
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
        return f"a gate: {outputs} outputs"
    weighs = [*seen.choices, *(seen.squashed if outputs in gates.experts else ())]
    if any(same(given, None if calls.output is None else calls.output.float()) for given in weighs):
        return "a router: its outputs are chosen from"
    return None


def _whole_input(seen: Recording, name: str, called: Iterable[str], rows: Tensor) -> Tensor:
    """Input of a module before the experts, if each expert reads rows of it; else the input of this linear."""
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
    """Experts that no token of the run went to are treated as those that some did."""
    added: dict[tuple[str, tuple[str, ...]], Draft] = {}
    for name in [name for name, reason in alone.items() if reason == NOT_CALLED and template(name) != name]:
        like = next((draft for draft in drafts if template(name) in draft.key), None)
        if like is None:
            continue
        del alone[name]
        # All experts are one set, also where a single one saw every token, and so reads what others read.
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
    """The name up to the number of the expert."""
    number = _EXPERT.search(name)
    return name[: number.end()] if number else name


def _readers(block: nn.Module, seen: Recording, rows: Tensor) -> list[str]:
    """Modules with a weight (N, K) of their own that read these rows."""
    weights = {name: module._parameters.get("weight") for name, module in block.named_modules()}
    return [
        name
        for name, what in seen.modules.items()
        if (w := weights[name]) is not None and w.dim() == 2 and w.shape[1] == rows.shape[-1] and same(what.rows, rows)
    ]
