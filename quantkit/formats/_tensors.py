"""What reading one linear's tensors has in common whatever the format: present, of this shape, or one line of error."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.numerics.scheme import LinearScheme


def take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    """A tensor that must be there.

    Args:
        tensors: of one linear, by local name.
        name: local name.
        shape: that it must have; None = any.
    Raises:
        CheckpointError: it is missing or has another shape.
    """
    if name not in tensors:
        raise CheckpointError(f"quantized linear has no tensor {name!r}, only {', '.join(sorted(tensors)) or 'none'}")
    found = tensors[name]
    if shape is not None and tuple(found.shape) != shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {tuple(found.shape)}, its scheme needs {shape}; "
            "config.json and weights do not belong together, or another version of the format's library packed them"
        )
    return found


def check_groups(scheme: LinearScheme, shape: tuple[int, int]) -> None:
    """Refuse groups that do not divide the inputs.

    Args:
        scheme: of one linear.
        shape: (N, K) of its weight.
    Raises:
        SchemeError: names the recipe field and the nearest size that fits.
    """
    try:
        scheme.weight.group_width(shape[1])
    except SchemeError as error:
        raise SchemeError(f"weights.group_size: {error}") from error


def refuse_activations(scheme: LinearScheme, format_name: str) -> None:
    """Refuse quantized activations in a format that has no place for them.

    Raises:
        SchemeError: says which format has.
    """
    if scheme.activation is not None:
        raise SchemeError(
            f"the {format_name} format has no place for {scheme.activation.describe()} activations; "
            "leave activations out, or write with --format compressed-tensors"
        )


def matrix_shape(shape: tuple[int, ...] | None) -> tuple[int, int] | None:
    """The shape of a matrix; None when there is no tensor or it is no matrix."""
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else None
