"""The ways to store a fused group that a search may choose from: number types in groups, written `int4:32`.

What a format cannot hold, or not beside others, is left out and said. Zero points do not load beside weights of another
scheme, so every candidate is symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.compress.pipeline.plan import Plan, build_plan
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import patched
from quantkit.errors import GateFailure, RecipeError, SchemeError, first_line
from quantkit.formats import REGISTRY as FORMATS
from quantkit.numerics.dtype import DTYPES, find_dtype
from quantkit.planning.weights import from_linear

FINE = 32  # groups of this many beside those of the base recipe, where its own are larger
SKIP = "skip"
_NOWHERE = "search-trial"  # an output that no plan of this module is carried out to


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A number type and its groups.

    Args:
        dtype: name of a number type.
        group_size: inputs that share a scale, or "channel".
    """

    dtype: str
    group_size: int | str

    @property
    def name(self) -> str:
        """As users write it, e.g. `int4:32`."""
        return f"{self.dtype}:{self.group_size}"

    @property
    def weights(self) -> dict[str, Any]:
        """`weights:` of a recipe."""
        return {"dtype": self.dtype, "group_size": self.group_size, "symmetric": True}


def base_groups(base: Recipe) -> int | str:
    """Group size of the recipe that a search starts from: a number or "channel".

    Raises:
        RecipeError: it quantizes no weights, or shares scales in a way that candidates cannot.
    """
    weights = base.source.get("weights")
    if weights is None:
        raise RecipeError(
            f"recipe {base.name!r} has no weights to search numbers for; start from one such as gptq-int4"
        )
    size: int | str = weights["group_size"]
    if isinstance(size, str) and size != "channel":
        raise RecipeError(
            f"recipe {base.name!r} has weights.group_size {size}, and candidates have groups of inputs; "
            "set weights.group_size to a number or 'channel'"
        )
    return size


def read_candidates(texts: Sequence[str], group_size: int | str) -> tuple[Candidate, ...]:
    """Candidates as given by a user; `skip` among them is dropped, since leaving alone is always a choice.

    Args:
        texts: such as `int4`, `int4:32` or `int8:channel`.
        group_size: where none is given.
    Raises:
        RecipeError: one that cannot be read.
    """
    candidates = []
    for text in texts:
        name, colon, size = text.strip().partition(":")
        if name == SKIP and not colon:
            continue
        try:
            dtype = find_dtype(name)
        except SchemeError as error:
            raise RecipeError(f"candidate {text!r}: {error}") from None
        if colon and size != "channel" and not re.fullmatch(r"[1-9]\d*", size):
            raise RecipeError(f"candidate {text!r}: {size!r} is no group size; write int4:32 or int8:channel")
        groups: int | str = (size if size == "channel" else int(size)) if colon else group_size
        candidates.append(Candidate(dtype=dtype.name, group_size=groups))
    if not candidates:
        raise RecipeError("no candidates to choose from; give number types such as int3,int4,int8")
    return tuple(dict.fromkeys(candidates))


def default_candidates(group_size: int | str) -> tuple[Candidate, ...]:
    """All integer types in the base recipe's groups, and those below 6 bits in finer ones.

    Args:
        group_size: of the base recipe.
    """
    names = [dtype.name for dtype in DTYPES.values() if dtype.kind == "int"]
    candidates = [Candidate(dtype=name, group_size=group_size) for name in names]
    if group_size == "channel" or int(group_size) > FINE:
        candidates += [Candidate(dtype=name, group_size=FINE) for name in names if DTYPES[name].bits in (3, 4, 5)]
    return tuple(candidates)


def uniform(base: Recipe, candidate: Candidate) -> Recipe:
    """The base recipe with these weights throughout, under a name of its own."""
    name = f"{candidate.dtype}-{candidate.group_size}"
    changes = {"name": name, "gates": [], **{f"weights.{key}": value for key, value in candidate.weights.items()}}
    return build(patched({"gates": list(base.gates), **base.source}, changes), base.name)


def mixed(base: Recipe, default: Candidate, choices: Sequence[tuple[Sequence[str], Candidate | None]]) -> Recipe:
    """The base recipe with weights of their own for some modules.

    Args:
        base: recipe.
        default: of what `choices` does not name.
        choices: full module names and their candidate; None = ignored.
    """
    return build(patched(base.source, mixed_changes(default, choices)), base.name)


def mixed_changes(default: Candidate, choices: Sequence[tuple[Sequence[str], Candidate | None]]) -> dict[str, Any]:
    """What `mixed` changes in a recipe's data."""
    overrides = [
        {"modules": list(modules), **({"skip": True} if candidate is None else {"weights": _size_only(candidate)})}
        for modules, candidate in choices
    ]
    return {**{f"weights.{key}": value for key, value in default.weights.items()}, "overrides": overrides}


def _size_only(candidate: Candidate) -> dict[str, Any]:
    return {"dtype": candidate.dtype, "group_size": candidate.group_size}


@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """The candidates that a model and a format allow.

    Args:
        candidates: in the order given.
        notes: why others were left out, one line each.
        num_weights: in the linears that a search may change.
        least_bytes: of these linears, each in its smallest candidate.
    """

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    num_weights: int
    least_bytes: int

    def require(self, bits: float | None) -> None:
        """Refuse a target below the smallest choice.

        Args:
            bits: per weight at most; None = something else is asked for.
        Raises:
            GateFailure: says what the least is.
        """
        least = 8 * self.least_bytes / self.num_weights
        if bits is not None and bits < least:
            smallest = ", ".join(candidate.name for candidate in self.candidates[:4])
            raise GateFailure(
                f"bits<={bits:g} cannot be reached: the smallest of the candidates ({smallest}"
                f"{', ...' if len(self.candidates) > 4 else ''}) take {least:.3f} bits per weight, scales included; "
                "ask for more, or give smaller --candidates"
            )


def usable(model: str | None, base: Recipe, candidates: Sequence[Candidate], device: str) -> Usable:
    """Those that the model's widths and the recipe's format allow, also beside one another.

    Args:
        model: directory or hub id; None = the demo model.
        base: the recipe to start from.
        candidates: wanted.
        device: where it will be compressed.
    Raises:
        RecipeError: the base recipe has overrides, or none of the candidates can be used.
        ModelError: the model cannot be compressed.
    """
    if base.source["overrides"]:
        raise RecipeError(f"recipe {base.name!r} has overrides, which a search decides; take them out, or use ignore")
    if FORMATS.load(base.format).suffix:
        raise RecipeError(
            f"a {base.format} file is not run by quantkit, so nothing can be measured; search with another format"
        )
    kept: list[Candidate] = []
    least: dict[str, int] = {}
    weights = 0
    notes: list[str] = []
    refused: SchemeError | None = None
    for candidate in candidates:
        try:
            plan = build_plan(model, uniform(base, candidate), _NOWHERE, device)
            names, sizes = list(plan.linears), dict(_stored_bytes(plan))
            layer = [name for name in names if name.rsplit(".", 2)[0] == names[0].rsplit(".", 2)[0]]
            if kept and len(layer) < len(names):
                build_plan(model, mixed(base, kept[0], [(layer, candidate)]), _NOWHERE, device)
        except SchemeError as error:
            refused = error
            notes.append(f"left out {candidate.name}: {first_line(error)}")
            continue
        kept.append(candidate)
        least = {name: min(size, least.get(name, size)) for name, size in sizes.items()}
        weights = sum(n * k for _, n, k in _shapes(plan))
    if not kept:
        raise RecipeError(f"none of the candidates can be used: {refused}")
    return Usable(candidates=tuple(kept), notes=tuple(notes), num_weights=weights, least_bytes=sum(least.values()))


def _shapes(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Full name, N and K of each linear to quantize."""
    for index, schemes in enumerate(plan.layers):
        shapes = plan.skeleton.linear_shapes(index)
        yield from ((f"{plan.skeleton.layer_name(index)}.{name}", *shapes[name]) for name in schemes)


def _stored_bytes(plan: Plan) -> Iterator[tuple[str, int]]:
    """Bytes that each linear will take, as `bits_per_weight` of a result counts them."""
    forms = {scheme: from_linear(scheme, plan.recipe.format) for scheme in set(plan.linears.values())}
    for name, out_features, in_features in _shapes(plan):
        size = plan.scale_dtype[name].itemsize
        yield name, forms[plan.linears[name]].matrix_bytes(out_features, in_features, size)
