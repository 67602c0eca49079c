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
"""Maximum number of threads of a computation. If OpenMP cannot start all requested threads, it aborts the process."""


def threads_within_quota() -> int:
    """Return torch's number of threads, or the cgroup's quota of cores if it is lower. OpenMP ignores this quota."""
    threads, quota = torch.get_num_threads(), cgroup_quota()
    return threads if quota is None else min(threads, quota)


def pick_device(name: str | torch.device) -> torch.device:
    """Return the torch device for the name auto, cpu, cuda or cuda:<i>; auto = a GPU if there is one.

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
        raise InputError(f"device {str(name)!r} does not exist: this machine has {count} CUDA devices; use cpu or auto")
    return device


def entered(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a GPU is the current device; launches of Triton kernels and events use this device.

    Args:
        device: any device; for a CPU, or a GPU without index, the context changes nothing.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def fast_cpu_dtype() -> torch.dtype:
    """Return the dtype in which this CPU is fast: bfloat16 if it has instructions for such products, else float32."""
    # torch for macOS has no oneDNN.
    is_fast = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)()
    if platform.machine() == "x86_64":
        # On CPUs with AVX-512 but without its bfloat16 products, oneDNN supports bfloat16 but converts every number,
        # and quantkit's kernels for AVX-512 do not run.
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
    """Return the bytes that this process can still allocate on a device; for a CPU, within the limit of its cgroup."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [int(psutil.virtual_memory().available)]
    group = Path("/sys/fs/cgroup")
    try:
        # In a container, MemAvailable counts the memory of the host, but the limit of the cgroup kills the process.
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit != "max":
            limits.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(limits)
