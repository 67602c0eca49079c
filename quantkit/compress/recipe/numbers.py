"""`weights:` and `activations:` of a recipe as schemes, and as plain data with every default filled in."""

from __future__ import annotations

from typing import Any

from quantkit.compress.recipe.schema import ActivationsSection, WeightChanges, WeightsSection, as_recipe_error
from quantkit.errors import RecipeError
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


def weight_scheme(fields: dict[str, Any], path: str) -> WeightScheme:
    """The scheme of a weight.

    Args:
        fields: plain data, as the functions of this module give it.
        path: the place in the file, for messages.
    Raises:
        RecipeError: no such scheme.
    """
    size, rows = fields["group_size"], 1
    if isinstance(size, str) and "x" in size:
        rows, size = map(int, size.split("x"))
    with as_recipe_error(path):
        return WeightScheme(
            dtype=find_dtype(fields["dtype"]),
            group_size=size if isinstance(size, int) else None,
            symmetric=fields["symmetric"],
            block_rows=None if size == "tensor" else rows,
        )


def activation_scheme(fields: dict[str, Any]) -> ActivationScheme:
    """The scheme of inputs.

    Args:
        fields: plain data, as `activation_fields` gives it.
    Raises:
        RecipeError: no such scheme.
    """
    dynamic = fields["dynamic"]
    with as_recipe_error("activations"):
        scheme = ActivationScheme(
            dtype=find_dtype(fields["dtype"]),
            granularity="token" if dynamic else "tensor",
            dynamic=dynamic,
            group_size=fields["group_size"],
        )
    if fields["clip"] != "absmax" and dynamic:
        raise RecipeError("activations.clip: only static scales are clipped; set activations.dynamic=false")
    return scheme


def _own_group(dtype: str) -> int | str:
    return find_dtype(dtype).group or "channel"
