"""Reading one linear's tensors, whatever the format: present, of this shape, or one line of error."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError


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
    tensor = tensors[name]
    if shape is not None and tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, its scheme needs {shape}; "
            "config.json and weights do not belong together, or another version of the format's library packed them"
        )
    return tensor


def take_matrix(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A matrix of one dtype that must be there, of any shape: codes, or words of them.

    Raises:
        CheckpointError: it is missing, no matrix, or of another dtype.
    """
    tensor = take(tensors, name, None)
    if tensor.ndim != 2 or tensor.dtype != dtype:
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, not a matrix of {dtype} as config.json says; "
            "the checkpoint contradicts itself: download it again"
        )
    return tensor


def take_one(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of one value, in whatever shape, as (1,).

    Raises:
        CheckpointError: it is missing or has several.
    """
    value = take(tensors, name, None).reshape(-1)
    if value.numel() != 1:
        raise CheckpointError(f"tensor {name!r} has {value.numel()} values, expected one for the whole weight")
    return value
