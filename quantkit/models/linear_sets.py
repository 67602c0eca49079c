"""Sets of linears of a decoder layer that read the same tensor, and the usual ones of a family. Torch-free."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.models.family import Experts, Parts

EXPERT = "{expert}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSet:
    """Linears of one decoder layer that read the same tensor. Names are relative to the layer.

    Args:
        linears: in the order in which they run; a loader that fuses them needs one scheme for all.
        source: the norm or linear that produces the input and can absorb a smoothing scale; None = nothing can.
        parent: smallest module that contains the set and turns its input into the layer's next hidden state;
            its output error is what a scale search minimises. "" = the layer.
        grouped_heads: the source's outputs are key/value heads, each repeated for several query heads.
        beside: modules with a weight (N, K) that read the same tensor and are never quantized (routers, gates); a scale
            that is folded into the source is folded into them too.
        optional: only some layers of the family, or some of its models, have these linears and this source. Of several
            sets with the same linear the first that is there counts.
        when: entries of config.json (or their defaults) that this set holds for.

    `{expert}` in a name stands for each number of an expert that the layer has: with a parent of its own for each
    expert there is one set for each, else one set of all.
    """

    linears: tuple[str, ...]
    source: str | None
    parent: str
    grouped_heads: bool = False
    beside: tuple[str, ...] = ()
    optional: bool = False
    when: tuple[tuple[str, Any], ...] = ()

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Linears that inference engines fuse, so that they need one scheme: those of one module, or of all experts."""
        together: dict[str, list[str]] = {}
        for name in self.linears:
            # Without numbers, as engines fuse the experts of a layer into one tensor.
            owner = re.sub(r"\.\d+(\.|$)", ".*\\1", name.rpartition(".")[0])
            together.setdefault(owner, []).append(name)
        return tuple(tuple(names) for names in together.values())


def fused_conflicts(sets: Iterable[LinearSet], schemes: Mapping[str, Any]) -> Iterator[str]:
    """Yield a complaint for each fused set whose linears do not have one scheme.

    Args:
        sets: of one layer.
        schemes: of its linears by relative name, None = ignored; names that it lacks are not there.
    """
    for names in (names for group in sets for names in group.fused):
        present = [name for name in names if name in schemes]
        if len({schemes[name] for name in present}) > 1:
            words = [f"{name} ({schemes[name].describe() if schemes[name] else 'ignored'})" for name in present]
            listed = ", ".join(words if len(words) <= 4 else (*words[:3], f"... {words[-1]}"))
            yield f"{listed} are fused by inference engines and need one scheme"


# Multi-head latent attention: queries through a narrow tensor or directly, keys and values always through one.
MLA_SETS = (
    LinearSet(
        linears=("self_attn.q_a_proj", "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
        source="input_layernorm",
        parent="self_attn",
        optional=True,
    ),
    LinearSet(linears=("self_attn.q_b_proj",), source="self_attn.q_a_layernorm", parent="self_attn", optional=True),
    LinearSet(linears=("self_attn.kv_b_proj",), source="self_attn.kv_a_layernorm", parent="self_attn"),
    LinearSet(linears=("self_attn.o_proj",), source=None, parent="self_attn.o_proj"),
)


def expand_set(group: LinearSet, has: Callable[[str], bool]) -> Iterator[LinearSet]:
    """Return the sets that one set of the family's data becomes in one layer; see `Family.sets_of_layer`."""
    templates = [name for name in group.linears if EXPERT in name]
    # A family's data does not say how many experts a layer has; its modules do.
    experts = list(itertools.takewhile(lambda e: has(at(templates[0], e)), itertools.count())) if templates else []
    if templates and EXPERT in group.parent:
        for expert in experts:
            yield replace(
                group,
                linears=tuple(at(name, expert) for name in group.linears),
                source=None if group.source is None else at(group.source, expert),
                parent=at(group.parent, expert),
            )
        return
    if templates and group.optional and not experts:
        return  # what shares a set with experts is theirs, and elsewhere an MLP's
    names = [at(name, e) for e in experts for name in templates]
    names += [name for name in group.linears if name not in templates and (not group.optional or has(name))]
    if names and not (group.optional and group.source is not None and not has(group.source)):
        yield replace(group, linears=tuple(names), beside=tuple(name for name in group.beside if has(name)))


def at(name: str, expert: int) -> str:
    """A name with the number of an expert in it."""
    return name.replace(EXPERT, str(expert))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLocation:
    """Return the place of an expert's linear in its layer.

    Args:
        owner: the module whose first argument is what experts read: the one that routes tokens, e.g. `mlp`, or where
            that is the layer, the experts.
        container: the experts, e.g. `mlp.experts`.
        number: of the expert.
    """

    owner: str
    container: str
    number: int


def find_expert(name: str) -> ExpertLocation | None:
    """The expert that a linear (relative name, e.g. `mlp.experts.3.up_proj`) belongs to; None = no expert."""
    match = re.fullmatch(r"((?:(.+)\.)?experts)\.(\d+)\..+", name)
    if match is None:
        return None
    return ExpertLocation(owner=match[2] or match[1], container=match[1], number=int(match[3]))


def common_owner(names: Iterable[str]) -> str:
    """The innermost module that contains all of these; empty where only the whole does."""
    # By whole names rather than characters: `experts.1` and `experts.10` have only `experts` in common.
    return os.path.commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".")


def split_experts(sets: tuple[LinearSet, ...]) -> tuple[LinearSet, ...]:
    """Sets for experts that each see only the tokens routed to them: those of several experts are taken apart.

    Nothing before them can absorb a scale of theirs, since each would want another one.
    """
    split: list[LinearSet] = []
    for group in sets:
        members: dict[str, list[str]] = {}
        for name in group.linears:
            expert = find_expert(name)
            members.setdefault("" if expert is None else f"{expert.container}.{expert.number}", []).append(name)
        if len(members) == 1:
            split.append(group)
        else:
            for owner, names in members.items():
                parent = owner or names[0].rpartition(".")[0]
                split.append(replace(group, linears=tuple(names), source=None, parent=parent, beside=()))
    return tuple(split)


def attention_sets(parts: Parts, norm: str | None, *, joint: bool) -> tuple[LinearSet, ...]:
    """Return the sets of attention; with a `joint` norm the MLP reads the same input and joins the first set."""
    together = len(parts.qkv) == 1
    first = LinearSet(
        linears=(*parts.qkv, *(parts.up if joint else ())),
        source=norm,
        parent="" if joint else parts.qkv[0].rpartition(".")[0],
    )
    # A scale for the output would have to be folded into some rows of a projection that is all three: not done.
    value = None if together else parts.qkv[2]
    return first, LinearSet(linears=(parts.output,), source=value, parent=parts.output, grouped_heads=not together)


def mlp_sets(parts: Parts, norm: str | None, *, joint: bool) -> tuple[LinearSet, ...]:
    """Return the sets of the MLP; with a `joint` norm its first linears stand in the set of attention."""
    # No scale passes through an activation, but one does through the product with its gate.
    source = parts.up[1] if parts.gated and len(parts.up) == 2 else None
    down = LinearSet(linears=(parts.down,), source=source, parent=parts.down)
    up = LinearSet(linears=parts.up, source=norm, parent=parts.up[0].rpartition(".")[0])
    return (down,) if joint else (up, down)


def expert_sets(data: Experts, norm: str | None) -> tuple[LinearSet, ...]:
    """Return the sets of a layer with experts: all readers of the router's input, then each expert's last linear."""
    beside = (data.router, *([data.shared_gate] if data.shared_gate else []))
    ups = LinearSet(
        linears=(*data.up, *data.shared_up),
        source=norm,
        parent=data.router.rpartition(".")[0],
        beside=beside,
        optional=True,
    )
    smooth = data.smooth_down and data.gated
    down = LinearSet(linears=(data.down,), source=data.up[1] if smooth else None, parent=data.down)
    if data.shared_down is None:
        return ups, down
    source = data.shared_up[1] if len(data.shared_up) == 2 else None
    shared = LinearSet(linears=(data.shared_down,), source=source, parent=data.shared_down, optional=True)
    return ups, down, shared
