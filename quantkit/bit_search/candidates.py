"""Candidates of a search: a number type and a group size for a fused group, written `int4:32`.

The search leaves out candidates that the format cannot store, alone or together with others, and says so in a note.
Engines do not load zero points together with weights of a different scheme, so every candidate is symmetric.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.compress.algorithms.base import follows_original
from quantkit.compress.pipeline.plan import Plan, build_plan
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import patched
from quantkit.errors import GateFailure, RecipeError, SchemeError, first_line
from quantkit.numerics.dtype import DTYPES, GGML_TYPES, find_dtype
from quantkit.numerics.scheme import LinearScheme
from quantkit.planning.memory import from_linear

FINE = 32  # size of the finer groups that are tried too, if the base recipe has larger groups
SKIP = "skip"
_NOWHERE = "search-trial"  # output path of this module's plans, which are never carried out


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A number type and its group size.

    Args:
        dtype: name of a number type.
        group_size: inputs that share a scale, or "channel".
    """

    dtype: str
    group_size: int | str

    @property
    def name(self) -> str:
        """The candidate as users write it, e.g. `int4:32`, or only `q4_k` for a type with fixed groups."""
        return self.dtype if self.dtype in GGML_TYPES else f"{self.dtype}:{self.group_size}"

    @property
    def file_name(self) -> str:
        """`name` without a colon, for file names."""
        return self.name.replace(":", "-")

    @property
    def weights(self) -> dict[str, Any]:
        """Value of `weights` in an override of a recipe."""
        return {"dtype": self.dtype, "group_size": self.group_size}


def base_groups(base: Recipe) -> int | str:
    """Return the group size of the recipe that a search starts from: a number or "channel".

    The field `strict` of a group size is ignored.

    Raises:
        RecipeError: the recipe quantizes no weights, or its scales are shared by block or by tensor, which no candidate
            supports.
    """
    weights = base.source.get("weights")
    if weights is None:
        raise RecipeError(
            f"recipe {base.name!r} quantizes no weights; start from a recipe that does, such as gptq-int4"
        )
    given: Any = weights["group_size"]
    size: int | str = given["size"] if isinstance(given, dict) else given
    if isinstance(size, str) and size != "channel":
        raise RecipeError(
            f"recipe {base.name!r} has weights.group_size {size}, which a search cannot vary; "
            "set weights.group_size to a number or 'channel'"
        )
    return size


def read_candidates(texts: Sequence[str], group_size: int | str) -> tuple[Candidate, ...]:
    """Read the candidates that a user gives; `skip` is dropped, since a group may always stay unquantized.

    Args:
        texts: such as `int4`, `int4:32` or `int8:channel`.
        group_size: group size for texts that do not give one.
    Raises:
        RecipeError: a text is not a candidate, or no candidate is left.
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
            raise RecipeError(
                f"candidate {text!r}: {size!r} is not a group size; give a number of inputs or 'channel', such as "
                "int4:32 or int8:channel"
            )
        groups: int | str = (size if size == "channel" else int(size)) if colon else dtype.group or group_size
        candidates.append(Candidate(dtype=dtype.name, group_size=groups))
    if not candidates:
        raise RecipeError("no candidates to choose from; give number types such as int3,int4,int8")
    return tuple(dict.fromkeys(candidates))


def default_candidates(group_size: int | str) -> tuple[Candidate, ...]:
    """Return all integer types with the base recipe's group size, and the 3- to 5-bit types with finer groups too.

    Args:
        group_size: group size of the base recipe.
    """
    names = [dtype.name for dtype in DTYPES.values() if dtype.kind == "int"]
    candidates = [Candidate(dtype=name, group_size=group_size) for name in names]
    if group_size == "channel" or int(group_size) > FINE:
        candidates += [Candidate(dtype=name, group_size=FINE) for name in names if DTYPES[name].bits in (3, 4, 5)]
    return tuple(candidates)


def gguf_candidates() -> tuple[Candidate, ...]:
    """Return the default candidates for a GGUF file: the K types, Q4_1 and Q8_0.

    Rows whose length is not a multiple of 256 get Q4_0, Q5_0, Q5_1 and Q8_0 instead of K types. For such rows, Q4_1
    fills the gap between Q4_0 and Q5_0.
    """
    return read_candidates(("q2_k", "q3_k", "q4_k", "q4_1", "q5_k", "q6_k", "int8:32"), FINE)


def changed(base: Recipe, default: Candidate, **fields: Any) -> Recipe:
    """Return the base recipe with this candidate as its default for weights, and with further fields replaced."""
    weights = {f"weights.{key}": value for key, value in {**default.weights, "symmetric": True}.items()}
    return build(patched(base.source, {**weights, **fields}), base.name)


def uniform(base: Recipe, candidate: Candidate) -> Recipe:
    """Return the base recipe with one candidate for all weights, named after the candidate."""
    return changed(base, candidate, name=candidate.file_name)


def trial(base: Recipe, candidate: Candidate) -> Recipe:
    """Return the base recipe with one candidate for all weights, changed so that each group can be tried alone.

    A group is tried in the original model, where its inputs have no errors that a step could compensate for. So the
    steps calibrate on the original model alone and run each layer once. All candidates see the same inputs.
    """
    recipe = uniform(base, candidate)
    alone = {
        f"steps.{name}.{key}": value
        for name, step in recipe.steps.items()
        for key, value in step.independent_options.items()
    }
    recipe = build(patched(recipe.source, alone), recipe.name)
    if recipe.calibration is None or follows_original(recipe.steps.values()):
        return recipe
    return build(patched(recipe.source, {"calibration.inputs": "original"}), recipe.name)


def override(patterns: Sequence[str], candidate: Candidate | None) -> dict[str, Any]:
    """Return an entry of a recipe's `overrides` that gives these modules a candidate; None = leave them unquantized."""
    return {"modules": list(patterns), **({"skip": True} if candidate is None else {"weights": candidate.weights})}


def usable(
    model: str | None,
    base: Recipe,
    candidates: Sequence[Candidate],
    device: str,
    bits: float | None = None,
    num_bytes: int | None = None,
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Return the candidates that the model's widths and the recipe's format allow, alone and together with others.

    Args:
        model: directory or hub id; None = the demo model.
        base: the recipe to start from.
        candidates: the candidates to check.
        device: where the model will be compressed.
        bits: target, the maximum bits per weight; None = the target is not a number of bits.
        num_bytes: target, the maximum bytes of the whole output; None = the target is not a size.
    Returns:
        The usable candidates in the given order, and one line with the reason for each candidate that was left out.
    Raises:
        RecipeError: the base recipe has overrides, or no candidate can be used.
        ModelError: the model cannot be compressed.
        GateFailure: even the smallest choice needs more than `bits` or `num_bytes`; the message says how much.
    """
    if base.source["overrides"]:
        raise RecipeError(f"recipe {base.name!r} has overrides, but a search writes its own; remove them or use ignore")
    kept: dict[Candidate, dict[str, LinearScheme]] = {}  # scheme of each linear, keyed by candidate and full name
    least: dict[str, int] = {}  # bytes of each linear in its smallest candidate
    weights = 0
    notes: list[str] = []
    refused: SchemeError | None = None
    for candidate in candidates:
        try:
            plan = build_plan(model, uniform(base, candidate), _NOWHERE, device)
            same = [other.name for other, linears in kept.items() if linears == plan.linears]
            if same:
                notes.append(f"left out {candidate.name}: for this model's widths it is the same as {same[0]}")
                continue
            sizes = _sizes(plan)
            # A format may store a scheme alone but not together with others, so try it in the first block only.
            first = next(iter(sizes)).rsplit(".", 2)[0]
            block = [name for name in sizes if name.rsplit(".", 2)[0] == first]
            if kept and len(block) < len(sizes):
                beside = changed(base, next(iter(kept)), overrides=[override(block, candidate)])
                build_plan(model, beside, _NOWHERE, device)
        except SchemeError as error:
            refused = error
            notes.append(f"left out {candidate.name}: {first_line(error)}")
            continue
        kept[candidate] = plan.linears
        least = {name: min(size, least.get(name, size)) for name, (_, size) in sizes.items()}
        weights = sum(count for count, _ in sizes.values())
    if not kept:
        raise RecipeError(f"none of the candidates can be used; the last one failed with: {refused}")
    names = [candidate.name for candidate in kept]
    _require("bits<={:g}", bits, 8 * sum(least.values()) / weights, "{:.3f} bits per weight, scales included", names)
    _require("bytes<={}", num_bytes, sum(least.values()), "{} bytes for the linears alone", names)
    return tuple(kept), tuple(notes)


def _require(target: str, limit: float | None, least: float, taken: str, names: list[str]) -> None:
    """Raise GateFailure if the limit of a target is below `least`, the size of the smallest choice."""
    if limit is not None and limit < least:
        raise GateFailure(
            f"{target.format(limit)} cannot be reached: the smallest candidates (of {', '.join(names[:4])}"
            f"{', ...' if len(names) > 4 else ''}) take {taken.format(least)}; "
            f"raise --{'bits' if target.startswith('bits') else 'size'}, or give smaller --candidates"
        )


def _sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the number of weights and the stored bytes of each linear to quantize, keyed by full name."""
    sizes = {}
    for index, schemes in enumerate(plan.layers):
        shapes = plan.skeleton.linear_shapes(index)
        for name, scheme in schemes.items():
            full = f"{plan.skeleton.layer_name(index)}.{name}"
            form, scale_bytes = from_linear(scheme, plan.recipe.format), plan.scale_dtype(full).itemsize
            sizes[full] = (math.prod(shapes[name]), form.matrix_bytes(*shapes[name], scale_bytes))
    return sizes
