"""`weights:` and `activations:` of a recipe as schemes, and as plain data with every default filled in."""

from __future__ import annotations

from typing import Any

from quantkit.compress.recipe.schema import ActivationsSection, WeightChanges, WeightsSection
from quantkit.errors import RecipeError, SchemeError
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scheme import ActivationScheme, WeightScheme


def weight_fields(weights: WeightsSection) -> dict[str, Any]:
    """`weights` as plain data, with the group size that its number type has by itself."""
    fields = weights.model_dump()
    return fields if fields["group_size"] != "auto" else {**fields, "group_size": _own_group(fields["dtype"])}


def changed_weights(weights: WeightsSection, changes: WeightChanges) -> dict[str, Any]:
    """The weights of an override as plain data: what it does not say is inherited.

    Args:
        weights: of the recipe.
        changes: of the override.
    """
    inherited, given = weight_fields(weights), changes.model_dump(exclude_none=True)
    dtype = given.get("dtype", inherited["dtype"])
    if dtype != inherited["dtype"] and (find_dtype(dtype).group or find_dtype(inherited["dtype"]).group):
        inherited["group_size"] = _own_group(dtype)  # groups of one type mean nothing to the other
    if given.get("group_size") == "auto":
        given["group_size"] = _own_group(dtype)
    return {**inherited, **given}


def activation_fields(activations: ActivationsSection) -> dict[str, Any]:
    """`activations` as plain data, with the group size that its number type has by itself."""
    fields = activations.model_dump()
    return {**fields, "group_size": fields["group_size"] or find_dtype(fields["dtype"]).group}


def weight_scheme(fields: dict[str, Any], where: str, path: str) -> WeightScheme:
    """The scheme of a weight.

    Args:
        fields: plain data, as the functions of this module give it.
        where, path: the file and the place in it, for messages.
    Raises:
        RecipeError: no such scheme.
    """
    size, rows = fields["group_size"], 1
    if isinstance(size, str) and "x" in size:
        rows, size = map(int, size.split("x"))
    try:
        return WeightScheme(
            dtype=find_dtype(fields["dtype"]),
            group_size=size if isinstance(size, int) else None,
            symmetric=fields["symmetric"],
            block_rows=None if size == "tensor" else rows,
        )
    except SchemeError as error:
        raise RecipeError(f"{where}: {path}: {error}") from None


def activation_scheme(activations: ActivationsSection | None, where: str) -> ActivationScheme | None:
    """The scheme of inputs; None when they are not quantized.

    Raises:
        RecipeError: no such scheme.
    """
    if activations is None:
        return None
    fields = activation_fields(activations)
    try:
        scheme = ActivationScheme(
            dtype=find_dtype(fields["dtype"]),
            granularity="token" if fields["dynamic"] else "tensor",
            dynamic=fields["dynamic"],
            group_size=fields["group_size"],
        )
    except SchemeError as error:
        raise RecipeError(f"{where}: activations: {error}") from None
    if fields["clip"] != "absmax" and scheme.dynamic:
        raise RecipeError(f"{where}: activations.clip: only static scales are clipped; set activations.dynamic=false")
    return scheme


def _own_group(dtype: str) -> int | str:
    return find_dtype(dtype).group or "channel"
