"""How much memory a process can still take, and whether a checkpoint fits into it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ResourceError
from quantkit.quantities import byte_size

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_memory(reader: CheckpointReader, dtype: torch.dtype, device: torch.device, memory: int | None) -> None:
    """The weights fit, with their largest tensor twice, before any of them is read.

    Args:
        reader: of the checkpoint.
        dtype: floats are converted to.
        device: where they go.
        memory: bytes that may be used; None = what is free.
    Raises:
        ResourceError: gives both figures.
    """
    sizes = []
    for name in reader.names:
        info = reader.info(name)
        converted = info.dtype in _FLOATS
        sizes.append(math.prod(info.shape) * dtype.itemsize if converted else info.num_bytes)
    needed, available = sum(sizes) + max(sizes, default=0), free_bytes(device) if memory is None else memory
    if needed > available:
        raise ResourceError(
            f"{reader.path}: loading needs {byte_size(needed)} on {device}, {byte_size(available)} are available; "
            "use a smaller or more strongly quantized model, or free memory"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that a process can still take on a device: the least of what the system and its control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = _meminfo("MemAvailable")
    limits = [] if found is None else [found]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit != "max":
            limits.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(limits) if limits else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(key: str) -> int | None:
    """An entry of /proc/meminfo in bytes; None where there is none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
