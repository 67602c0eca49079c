"""What all GPU benches share: arguments, results, the machine and its ceilings, measured in the same run.

Imported before quantkit by every part, because a rehearsal on the CPU has to choose Triton's interpreter first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if "--device=cpu" in sys.argv or " --device cpu" in " ".join(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from results import Absent as Absent
from results import Results

import quantkit.kernels.gpu as kernels
from quantkit.distribution import installed_version
from quantkit.kernels import ops

ROOT = Path(__file__).resolve().parents[2]
_measuring = contextlib.ExitStack()  # for as long as the process lives


def parse(seconds: float = 60.0, **switches: str) -> argparse.Namespace:
    """Arguments that all parts share; without a GPU the kernels are then run by Triton's interpreter.

    Args:
        seconds: that the part takes on its own.
        switches: what else it can be told, with help.
    """
    parser = argparse.ArgumentParser()
    for name, text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a rehearsal")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop starting new measurements after these")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --tiny rehearses without one")
    if arguments.device == "cpu":
        rehearse()
    refuse_torch()
    return arguments


def refuse_torch() -> None:
    """From now on a kernel that Triton refuses is an error: torch's figures must not pass for it."""
    _measuring.enter_context(kernels.measuring())


def rehearse() -> None:
    """Have quantkit take its GPU kernels on the CPU; `TRITON_INTERPRET=1` must have been set before Triton's import."""
    os.environ["QUANTKIT_NATIVE"] = "0"

    def is_used(device: torch.device) -> bool:
        return device.type == "cpu" and kernels.is_installed() and os.environ.get("QUANTKIT_TRITON") != "0"

    kernels.is_used = is_used  # type: ignore[assignment]
    ops._on_gpu = lambda x: kernels.module("ops", x.device)


def dtype_on(device: str) -> torch.dtype:
    """What models compute in: bfloat16; float16 in the interpreter, which computes bfloat16 wrongly."""
    return torch.float16 if device == "cpu" else torch.bfloat16


def open_results(name: str, arguments: argparse.Namespace, row_seconds: float = 60.0, share: float = 0.6) -> Results:
    """The rows of a part, with what this machine is.

    Args:
        name: of the file.
        arguments: see `parse`.
        row_seconds: the longest that one measurement may take on a GPU.
        share: of the part's time that one measurement may take: one that hangs leaves the rest to those behind it.
    """
    limit = min(row_seconds, share * arguments.seconds) if arguments.device == "cuda" else 20 * row_seconds
    return Results(name, describe(arguments.device), arguments.seconds, limit, is_lost)


def is_lost() -> bool:
    """Whether an earlier kernel has broken this process's access to its device: all that follows fails too."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def describe(device: str) -> dict[str, Any]:
    """Machine, versions and commit, and what a copy reaches in this process."""
    meta: dict[str, Any] = {"torch": torch.__version__, "triton": installed_version("triton", "absent")}
    meta |= {"python": platform.python_version(), "commit": commit()}
    if device != "cuda":
        meta |= {"device": platform.processor() or "cpu", "rehearsal": True}
        return {**meta, "copy_bandwidth": copy_bandwidth(1 << 20, device)}
    properties = torch.cuda.get_device_properties(0)
    meta["copy_bandwidth"] = copy_bandwidth()
    torch.cuda.empty_cache()  # of which the part may need all
    return {
        **meta,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def commit() -> str:
    """Of the sources; without git, or outside a clone, what the environment says."""
    said = ""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
        said = done.stdout.strip()
    return said or os.environ.get("QUANTKIT_COMMIT", "unknown")


def copy_bandwidth(num_bytes: int = 4 << 30, device: str = "cuda") -> float:
    """Bytes per second, read plus written, of a copy on the device."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / measure([lambda: target.copy_(source)], device, repeats=10)["us"] * 1e6


def gemm_rate(size: int = 8192, device: str = "cuda") -> float:
    """FLOP per second of a large bf16 product of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / measure([lambda: torch.mm(a, b, out=out)], device, repeats=20)["us"] * 1e6


Calls = Sequence[Callable[[], object]]


def num_copies(num_bytes: int, device: str) -> int:
    """Number of copies of an operand, 64 at most, that make more than four L2 caches, through which calls rotate."""
    if device != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(64, -(-4 * cache // max(num_bytes, 1)) + 1))


def measure(calls: Calls, device: str, repeats: int = 15) -> dict[str, Any]:
    """Microseconds of one call: median, p10 and p90 over repeats, each repeat going once through all calls.

    On CUDA a graph of all calls is recorded once and replayed, so that the host is not in the figure; calls that cannot
    be recorded are timed as they are, and the figure says so. Elsewhere it is the host's clock, for rehearsals.

    Raises:
        ArithmeticError: see `refuse_nan`.
    """
    refuse_nan(calls[0]())
    if device != "cuda":
        times = sorted(_seconds(calls) * 1e6 / len(calls) for _ in range(min(repeats, 3)))
        how = "host"
    else:
        _seconds(calls)  # compiles what they need
        # Short calls repeat within one graph, so that launching the graph does not show.
        rounds = max(1, 32 // len(calls)) if _seconds(calls[:1]) < 2e-3 else 1
        run, how = _captured([*calls] * rounds)
        for _ in range(3):
            run()
        marks = []
        for _ in range(repeats):
            # Nothing waits in here: a host that does lets the device run idle between samples.
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) * 1e3 / (len(calls) * rounds) for begin, end in marks)
    return {"us": median(times), "p10": times[len(times) // 10], "p90": times[-1 - len(times) // 10], "how": how}


def refuse_nan(result: object) -> None:
    """Raise ArithmeticError if a result has numbers that are not finite: the time of a wrong result is no figure."""
    if isinstance(result, torch.Tensor) and result.is_floating_point() and not result.isfinite().all():
        raise ArithmeticError("the result has numbers that are not finite")


def _seconds(calls: Calls) -> float:
    """Time of calls on the host's clock, until the device is done."""
    begun = time.perf_counter()
    for call in calls:
        call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _captured(calls: Calls) -> tuple[Callable[[], object], str]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # a host sync inside, or an allocation that a graph cannot have
        torch.cuda.synchronize()
        return lambda: [call() for call in calls], "eager"
    return graph.replay, "graph"
