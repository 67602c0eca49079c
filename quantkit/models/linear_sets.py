"""Which linears of a decoder layer belong together, as data: sets of linears that read the same tensor. Torch-free."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
        """Those of its linears that inference engines fuse, which need one scheme: of one module, or all experts."""
        together: dict[str, list[str]] = {}
        for name in self.linears:
            owner = re.sub(r"\.\d+(\.|$)", ".*\\1", name.rpartition(".")[0])
            together.setdefault(owner, []).append(name)
        return tuple(tuple(names) for names in together.values())


WIDEN = "widen the pattern in overrides or ignore to cover all of them"


def fused_conflicts(sets: Iterable[LinearSet], schemes: Mapping[str, Any]) -> Iterator[str]:
    """What is said of each fused set whose linears do not have one scheme.

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


LLAMA_SETS = (
    LinearSet(
        linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        source="input_layernorm",
        parent="self_attn",
    ),
    LinearSet(linears=("self_attn.o_proj",), source="self_attn.v_proj", parent="self_attn.o_proj", grouped_heads=True),
    LinearSet(linears=("mlp.gate_proj", "mlp.up_proj"), source="post_attention_layernorm", parent="mlp"),
    LinearSet(linears=("mlp.down_proj",), source="mlp.up_proj", parent="mlp.down_proj"),
)

# Nothing upstream can absorb a scale: the norm adds an offset or a bias, stands elsewhere, or feeds other linears too.
UNSMOOTHED_SETS = (
    LinearSet(linears=LLAMA_SETS[0].linears, source=None, parent="self_attn"),
    LLAMA_SETS[1],
    LinearSet(linears=LLAMA_SETS[2].linears, source=None, parent="mlp"),
    LLAMA_SETS[3],
)


# Attention and MLP read the same norm: one set, whose outputs come together in the layer itself.
PARALLEL_SETS = (
    LinearSet(linears=(*LLAMA_SETS[0].linears, *LLAMA_SETS[2].linears), source="input_layernorm", parent=""),
    LLAMA_SETS[1],
    LLAMA_SETS[3],
)

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


def expert_sets(
    *,
    source: str | None = "post_attention_layernorm",
    shared: str | None = None,
    beside: tuple[str, ...] = ("mlp.gate",),
) -> tuple[LinearSet, ...]:
    """Sets of layers whose MLP is a mixture of experts, and of those where it is dense.

    Args:
        source: the norm before the MLP; None = it can absorb nothing.
        shared: name of an expert that every token passes, e.g. `mlp.shared_experts`.
        beside: the router, and the gate of the shared expert.
    """
    expert = f"mlp.experts.{EXPERT}."
    ups: tuple[str, ...] = (f"{expert}gate_proj", f"{expert}up_proj")
    sets = [LinearSet(linears=(f"{expert}down_proj",), source=f"{expert}up_proj", parent=f"{expert}down_proj")]
    if shared is not None:
        ups = (*ups, f"{shared}.gate_proj", f"{shared}.up_proj")
        name = f"{shared}.down_proj"
        sets.append(LinearSet(linears=(name,), source=f"{shared}.up_proj", parent=name, optional=True))
    mixture = LinearSet(linears=ups, source=source, parent="mlp", beside=beside, optional=True)
    dense = (replace(LLAMA_SETS[2], source=source, optional=True), replace(LLAMA_SETS[3], optional=True))
    return (mixture, *sets, *dense)


def expand_set(group: LinearSet, has: Callable[[str], bool]) -> Iterator[LinearSet]:
    """What a set of the family's data becomes in one layer; see `Family.sets_of_layer`."""
    templates = [name for name in group.linears if EXPERT in name]
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
    names = [at(name, e) for e in experts for name in templates]
    names += [name for name in group.linears if name not in templates and (not group.optional or has(name))]
    if names and not (group.optional and group.source is not None and not has(group.source)):
        yield replace(group, linears=tuple(names), beside=tuple(name for name in group.beside if has(name)))


def at(name: str, expert: int) -> str:
    """A name with the number of an expert in it."""
    return name.replace(EXPERT, str(expert))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlace:
    """Where a linear of an expert is in its layer.

    Args:
        owner: the module that routes tokens, e.g. `mlp`; its first argument is what experts read.
        container: the experts, e.g. `mlp.experts`.
        number: of the expert.
    """

    owner: str
    container: str
    number: int


def find_expert(name: str) -> ExpertPlace | None:
    """The expert that a linear (relative name, e.g. `mlp.experts.3.up_proj`) belongs to; None = no expert."""
    match = re.fullmatch(r"(([^.]+(?:\.[^.]+)*)\.experts)\.(\d+)\..+", name)
    return None if match is None else ExpertPlace(owner=match[2], container=match[1], number=int(match[3]))


def split_experts(sets: tuple[LinearSet, ...]) -> tuple[LinearSet, ...]:
    """Sets for experts that each see only the tokens routed to them: those of several experts are taken apart.

    Nothing upstream can absorb a scale of theirs, since each would want another one.
    """
    found: list[LinearSet] = []
    for group in sets:
        members: dict[str, list[str]] = {}
        for name in group.linears:
            place = find_expert(name)
            members.setdefault("" if place is None else f"{place.container}.{place.number}", []).append(name)
        if len(members) == 1:
            found.append(group)
        else:
            found += [
                replace(group, linears=tuple(linears), source=None, parent=_parent(owner, linears), beside=())
                for owner, linears in members.items()
            ]
    return tuple(found)


def _parent(expert: str, linears: list[str]) -> str:
    return expert or linears[0].rpartition(".")[0]
