"""Devices: choice by name, hardware name, and free memory."""

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit.errors import InputError
from quantkit.machine.system import cgroup_quota

MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""Maximum number of threads of a computation. OpenMP aborts the process if it cannot start the requested number."""


def threads_within_quota() -> int:
    """Return torch's number of threads, lowered to the cgroup quota, which OpenMP does not know."""
    threads, quota = torch.get_num_threads(), cgroup_quota()
    return threads if quota is None else min(threads, quota)


def pick_device(name: str | torch.device) -> torch.device:
    """Return the device for auto, cpu, cuda or cuda:<i>.

    Raises:
        InputError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise InputError(f"unknown device {str(name)!r}; use auto, cpu, cuda or cuda:<i>")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"device {str(name)!r} does not exist: {count} CUDA devices found; use cpu or auto")
    return device


def entered(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current device in this context, because Triton launches and events use the current device.

    Args:
        device: any device; a CPU, or a GPU without index, changes nothing.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def fast_cpu_dtype() -> torch.dtype:
    """Return bfloat16 if this CPU has instructions for bfloat16 products, otherwise float32; float16 would be slow."""
    # torch for macOS has no oneDNN.
    is_fast = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)()
    if platform.machine() == "x86_64":
        # oneDNN also multiplies in bfloat16 on CPUs with AVX-512 but without its bfloat16 products. It converts every
        # number there, and our kernels for AVX-512 do not run.
        is_fast = is_fast and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def processor_name() -> str:
    """Return the name of the CPU as the system reports it; empty if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device; on a CPU, a cgroup may limit them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [int(psutil.virtual_memory().available)]
    group = Path("/sys/fs/cgroup")
    try:
        # In a container, MemAvailable is that of the host, but the process is killed at the limit of its cgroup.
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit != "max":
            limits.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(limits)
