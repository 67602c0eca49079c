"""Sets of linears, and the default sets of a family. Torch-free.

A *set of linears* is all linears of a decoder layer that read the same tensor: query, key and value projections,
or gate and up projections. A linear that shares its input with no other linear forms its own set. Statistics of
inputs and smoothing scales belong to a set. Inference engines multiply some linears of a set as one: a *fused group*.
"""

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
        linears: names in execution order; see `fused` for the linears that need the same scheme.
        source: norm or linear that produces the input and can absorb a smoothing scale; None = there is no such module.
        parent: smallest module that contains the set and turns the set's input into the layer's next hidden state;
            a scale search minimises the output error of this module. "" = the layer.
        grouped_heads: whether the source's outputs are key/value heads, each repeated for several query heads.
        beside: modules with a weight (N, K) that read the same tensor and are never quantized (routers, gates); when a
            scale is folded into the source, they are rescaled like the linears.
        source_offset: number that the source adds to its weight, as Gemma's norms do.
        optional: whether only some layers or models of the family have these linears and this source. If several sets
            name the same linear, a layer uses the first of them that it has.
        when: values of config.json entries (or their defaults) for which this set applies.

    `{expert}` in a name stands for the number of each expert of the layer. If the parent's name contains `{expert}`,
    there is one set per expert; otherwise one set holds all experts.
    """

    linears: tuple[str, ...]
    source: str | None
    parent: str
    grouped_heads: bool = False
    beside: tuple[str, ...] = ()
    source_offset: float = 0.0
    optional: bool = False
    when: tuple[tuple[str, Any], ...] = ()

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Groups of linears that inference engines fuse, so each group needs one scheme."""
        together: dict[str, list[str]] = {}
        for name in self.linears:
            # Replace experts' numbers, because engines fuse all experts of a layer into one tensor.
            owner = re.sub(r"\.\d+(\.|$)", ".*\\1", name.rpartition(".")[0])
            together.setdefault(owner, []).append(name)
        return tuple(tuple(names) for names in together.values())


def fused_conflicts(sets: Iterable[LinearSet], schemes: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each fused group whose linears have different schemes.

    Args:
        sets: sets of one layer.
        schemes: scheme of each linear of the layer, keyed by relative name; None = the linear is ignored.
    """
    for names in (names for group in sets for names in group.fused):
        present = [name for name in names if name in schemes]
        if len({schemes[name] for name in present}) > 1:
            words = [f"{name} ({schemes[name].describe() if schemes[name] else 'ignored'})" for name in present]
            listed = ", ".join(words if len(words) <= 4 else (*words[:3], f"... {words[-1]}"))
            yield f"{listed} are fused by inference engines and need one scheme"


# Multi-head latent attention: the low-rank projection is optional for queries, but not for keys and values.
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
    """Yield the sets that one layer gets from one set of the family; see `Family.sets_of_layer`."""
    templates = [name for name in group.linears if EXPERT in name]
    # Count the experts by the layer's modules, because the family's data does not give their number.
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
        return  # without experts, the set's other linears belong to the MLP's set
    names = [at(name, e) for e in experts for name in templates]
    names += [name for name in group.linears if name not in templates and (not group.optional or has(name))]
    if names and not (group.optional and group.source is not None and not has(group.source)):
        yield replace(group, linears=tuple(names), beside=tuple(name for name in group.beside if has(name)))


def at(name: str, expert: int) -> str:
    """Insert the number of an expert into a name."""
    return name.replace(EXPERT, str(expert))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLocation:
    """Location of an expert's linear in its layer.

    Args:
        owner: the module whose first argument is the experts' input: usually the module that routes tokens, e.g. `mlp`.
            If the layer itself routes tokens, the owner is the experts module.
        container: the experts module, e.g. `mlp.experts`.
        number: number of the expert.
    """

    owner: str
    container: str
    number: int


def find_expert(name: str) -> ExpertLocation | None:
    """Return the location of the expert that a linear belongs to; None if the linear belongs to no expert.

    Args:
        name: name of the linear relative to the layer, e.g. `mlp.experts.3.up_proj`.
    """
    match = re.fullmatch(r"((?:(.+)\.)?experts)\.(\d+)\..+", name)
    if match is None:
        return None
    return ExpertLocation(owner=match[2] or match[1], container=match[1], number=int(match[3]))


def common_owner(names: Iterable[str]) -> str:
    """Return the innermost module that contains all of these modules; empty if only the layer itself does."""
    # Compare whole names, not characters: `experts.1` and `experts.10` have only `experts` in common.
    return os.path.commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".")


def split_experts(sets: tuple[LinearSet, ...]) -> tuple[LinearSet, ...]:
    """Split sets that span several experts into one set per expert, because each expert sees only its routed tokens.

    The source cannot absorb a smoothing scale of the split sets, because each expert would need a different scale.
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
    """Return the sets of attention.

    If `joint`, attention and MLP read the same input, so the MLP's first linears belong to attention's first set.
    """
    together = len(parts.qkv) == 1
    first = LinearSet(
        linears=(*parts.qkv, *(parts.up if joint else ())),
        source=norm,
        parent="" if joint else parts.qkv[0].rpartition(".")[0],
    )
    # In a fused projection, a scale would have to be folded into the rows of v alone, which quantkit does not do.
    value = None if together else parts.qkv[2]
    return first, LinearSet(linears=(parts.output,), source=value, parent=parts.output, grouped_heads=not together)


def mlp_sets(parts: Parts, norm: str | None, *, joint: bool) -> tuple[LinearSet, ...]:
    """Return the sets of the MLP. If `joint`, the MLP's first linears are left out: `attention_sets` has them."""
    # A scale does not pass through the activation, but it passes through the product of gate and up: fold it into up.
    source = parts.up[1] if parts.gated and len(parts.up) == 2 else None
    down = LinearSet(linears=(parts.down,), source=source, parent=parts.down)
    up = LinearSet(linears=parts.up, source=norm, parent=parts.up[0].rpartition(".")[0])
    return (down,) if joint else (up, down)


def expert_sets(data: Experts, norm: str | None) -> tuple[LinearSet, ...]:
    """Return the sets of a layer with experts: all linears that read the router's input, then the down projections."""
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
