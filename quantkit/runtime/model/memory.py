"""Whether a checkpoint fits into the memory there is, found before any of its weights are read."""

from __future__ import annotations

import math

import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ResourceError
from quantkit.quantities import byte_size
from quantkit.runtime.devices import free_bytes

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_memory(reader: CheckpointReader, dtype: torch.dtype, device: torch.device) -> None:
    """The weights fit, with their largest tensor twice, before any of them is read.

    Args:
        reader: of the checkpoint.
        dtype: floats are converted to.
        device: where they go.
    Raises:
        ResourceError: gives both figures.
    """
    sizes = []
    for name in reader.names:
        info = reader.info(name)
        converted = info.dtype in _FLOATS
        sizes.append(math.prod(info.shape) * dtype.itemsize if converted else info.num_bytes)
    needed, available = sum(sizes) + max(sizes, default=0), free_bytes(device)
    if needed > available:
        raise ResourceError(
            f"{reader.path}: loading needs {byte_size(needed)} on {device}, {byte_size(available)} are available; "
            "use a smaller or more strongly quantized model, or free memory"
        )
