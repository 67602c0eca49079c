"""Take the tensors that store one linear from a dictionary, and check their shapes and dtypes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError


def matrix_shape(shape: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Return the shape of a matrix; None if there is no tensor or it is not a matrix."""
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else None


def take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    """Return a required tensor.

    Args:
        tensors: tensors of one linear, keyed by local name.
        name: local name of the tensor.
        shape: required shape; None = any.
    Raises:
        CheckpointError: the tensor is missing or has a different shape.
    """
    if name not in tensors:
        present = ", ".join(sorted(tensors)) or "none"
        raise CheckpointError(
            f"the quantized linear has no tensor {name!r}; its tensors: {present}; download the checkpoint again"
        )
    tensor = tensors[name]
    if shape is not None and tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, but its scheme needs {shape}; config.json does not "
            "match the weights, or an unsupported version of the format's library packed them"
        )
    return tensor


def take_matrix(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Return a required matrix of any shape and one dtype: codes, or words of packed codes.

    Raises:
        CheckpointError: the tensor is missing, is not a matrix, or has a different dtype.
    """
    tensor = take(tensors, name, None)
    if tensor.ndim != 2 or tensor.dtype != dtype:
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, but config.json requires a matrix of {dtype}; "
            "download the checkpoint again"
        )
    return tensor


def take_one(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a required tensor that holds one value, reshaped to (1,).

    Raises:
        CheckpointError: the tensor is missing or has several values.
    """
    value = take(tensors, name, None).reshape(-1)
    if value.numel() != 1:
        raise CheckpointError(
            f"tensor {name!r} has {value.numel()} values; expected one for the whole weight; download the "
            "checkpoint again"
        )
    return value
