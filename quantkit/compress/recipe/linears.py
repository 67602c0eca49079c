"""Linears that a recipe is applied to, and notes about linears that do not get the scheme that the recipe asks for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quantkit.compress.recipe.load import Recipe
from quantkit.models.linear_sets import LinearSet
from quantkit.numerics.scheme import LinearScheme

Schemes = dict[str, LinearScheme | None]
"""Schemes of a layer's linears by relative name; None = unquantized."""


class LayerLinears(NamedTuple):
    """Linears that a recipe may quantize in one module: a decoder layer, a module of a tower, or an MTP head's layer.

    Args:
        name: full name of the module.
        shapes: shape (N, K) of each linear, keyed by name relative to the module.
        sets: linears that read the same tensor; engines fuse some of them.
        beside: whether the module is outside the decoder layers: in a vision or audio tower or an MTP head. Its linears
            are quantized only by rules whose patterns match nothing in the decoder layers.
        is_head: whether the module is the decoder layer of an MTP head. If so, `beside` is also True, and linears that
            no rule matches get the recipe's `mtp`.
    """

    name: str
    shapes: Mapping[str, tuple[int, int]]
    sets: Sequence[LinearSet]
    beside: bool = False
    is_head: bool = False


def group_notes(asked: Recipe, layers: Sequence[LayerLinears], assigned: Sequence[Schemes]) -> tuple[str, ...]:
    """Return one sentence about linears whose groups are smaller than requested, if there are any.

    Args:
        asked: the recipe as given.
        layers: layers of the model.
        assigned: schemes of the linears.
    """
    smaller: dict[tuple[int, int], list[str]] = {}
    widths: dict[int, set[int]] = {}
    for name, width, rule, given in _asked_and_given(asked, layers, assigned):
        before, after = rule.weight.group_size, given.weight.group_size
        if before is None or after is None or before == after or asked.scheme.keeps(name):
            continue
        if given.weight.dtype == rule.weight.dtype:
            smaller.setdefault((before, after), []).append(name)
            if width % before:
                widths.setdefault(before, set()).add(width)
    if not smaller:
        return ()
    total = count_linears(assigned)
    what = "; ".join(
        (f"all {total} linears" if len(names) == total else f"{len(names)} of {total} linears, such as {names[0]},")
        + f" have groups of {after} instead"
        for (before, after), names in smaller.items()
    )
    why = ", ".join(
        f"group_size {before} does not divide {' and '.join(map(str, sorted(own)))} inputs"
        for before, own in widths.items()
    )
    return (f"{why}: {what}",)


def fallback_notes(asked: Recipe, layers: Sequence[LayerLinears], assigned: Sequence[Schemes]) -> tuple[str, ...]:
    """Return one sentence for each ggml type that some linears get instead of the type that the recipe asks for.

    A linear gets a different type if its number of inputs is not a multiple of the requested type's block size. For the
    arguments, see `group_notes`.
    """
    others: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for name, width, rule, given in _asked_and_given(asked, layers, assigned):
        if rule.weight.dtype.block is not None and given != rule:
            others.setdefault((rule.weight.dtype.name, given.weight.describe()), []).append((name, width))
    return tuple(
        f"blocks of {before} do not divide {' and '.join(map(str, sorted({width for _, width in replaced})))} inputs: "
        f"{len(replaced)} of {count_linears(assigned)} linears, such as {replaced[0][0]}, are {after} instead"
        for (before, after), replaced in others.items()
    )


def _asked_and_given(
    asked: Recipe, layers: Sequence[LayerLinears], assigned: Sequence[Schemes]
) -> Iterator[tuple[str, int, LinearScheme, LinearScheme]]:
    """Yield for each linear with a scheme: its full name, its number of inputs, the scheme that the recipe asks for,
    and the scheme that it gets.
    """
    for layer, schemes in zip(layers, assigned, strict=True):
        for name, given in schemes.items():
            full = f"{layer.name}.{name}"
            rule = asked.mtp if layer.is_head else asked.scheme.find(full)
            if given is not None and rule is not None:
                yield full, layer.shapes[name][1], rule, given


def count_linears(assigned: Sequence[Schemes]) -> int:
    """Count the linears that have a scheme."""
    return sum(scheme is not None for schemes in assigned for scheme in schemes.values())
