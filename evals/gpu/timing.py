"""What all GPU benches share: arguments, rows of results, the machine and its ceilings, measured in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantkit.measure.timing import measure


def parse(seconds: float = 60.0) -> argparse.Namespace:
    """Arguments that all parts share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a rehearsal")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop starting new measurements after these")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --tiny rehearses without one")
    return arguments


class Results:
    """Rows of one part, written after each so that a part that is stopped loses nothing."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.path = Path(os.environ.get("OUT", "evals/results/gpu")) / f"{name}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.meta: dict[str, Any] = describe(arguments.device)
        self.rows: list[dict[str, Any]] = []
        self._end = time.monotonic() + arguments.seconds

    @property
    def out_of_time(self) -> bool:
        """Whether no further measurement should be started."""
        return time.monotonic() > self._end

    def add(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        self.save()

    def attempt(self, work: Callable[[], dict[str, Any]], **labels: Any) -> dict[str, Any] | None:
        """Run one measurement; an error becomes a row of its own and the next one goes on."""
        if self.out_of_time:
            return None
        try:
            found = work()
        except Exception as error:  # whatever a kernel raises on a machine it has never seen
            self.add(
                **labels, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            )
            return None
        self.add(**labels, **found)
        return found

    def guard(self, work: Callable[[], None], **labels: Any) -> None:
        """Run work that adds rows itself; an error becomes a row."""
        try:
            work()
        except Exception as error:
            self.add(
                **labels, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            )

    def save(self) -> None:
        """Write everything so far."""
        self.path.write_text(json.dumps({"meta": self.meta, "rows": self.rows}, indent=1) + "\n")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(device: str) -> dict[str, Any]:
    """Machine, versions and commit."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "absent"
    found = {"torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found["commit"] = done.stdout.strip() or os.environ.get("QUANTKIT_COMMIT", "unknown")
    if device != "cuda":
        return {**found, "device": platform.processor() or "cpu", "rehearsal": True}
    properties = torch.cuda.get_device_properties(0)
    return {
        **found,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "copy_bandwidth": copy_bandwidth(),
    }


def copy_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second, read plus written, of a device-to-device copy."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / measure([lambda: target.copy_(source)], "cuda", repeats=10)["us"] * 1e6


def gemm_rate(size: int = 8192) -> float:
    """FLOP per second of a large bf16 product of random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / measure([lambda: torch.mm(a, b, out=out)], "cuda", repeats=20)["us"] * 1e6
