"""How much memory a device has left."""

import os
from pathlib import Path

import torch

from quantkit.machine.memory import proc_bytes


def free_bytes(device: torch.device) -> int:
    """Memory that a process can still take on a device: the least of what the system and its control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = proc_bytes("meminfo", "MemAvailable")
    limits = [] if available is None else [available]
    group = Path("/sys/fs/cgroup")
    try:
        # In a container MemAvailable is the host's, and the group's limit ends the process before that is used up.
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit != "max":
            limits.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(limits) if limits else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
