"""What all GPU benches share: arguments, rows of results, the machine and its ceilings, measured in the same run.

Imported before quantkit by every part, because a rehearsal on the CPU has to choose Triton's interpreter first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--device=cpu" in sys.argv or " --device cpu" in " ".join(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from quantkit.benchmark.timing import measure

# After so many errors, and no success, a kind is not tried again.
_MOST_FAILURES = 3


class Absent(Exception):
    """A peer, or a part of this machine, is not there; the message says why."""


def parse(seconds: float = 60.0) -> argparse.Namespace:
    """Arguments that all parts share; without a GPU the kernels are then run by Triton's interpreter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a rehearsal")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop starting new measurements after these")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --tiny rehearses without one")
    if arguments.device == "cpu":
        rehearse()
    return arguments


def rehearse() -> None:
    """Have quantkit take its GPU kernels on the CPU; `TRITON_INTERPRET=1` must have been set before Triton's import."""
    import quantkit.kernels.gpu as kernels

    os.environ["QUANTKIT_NATIVE"] = "0"
    kernels.is_used = lambda device: device.type == "cpu" and kernels.is_installed()  # type: ignore[assignment]


def dtype_on(device: str) -> torch.dtype:
    """What models compute in: bfloat16; float16 in the interpreter, which computes bfloat16 wrongly."""
    return torch.float16 if device == "cpu" else torch.bfloat16


class Results:
    """Rows of one part, written after each so that a part that is stopped loses nothing."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.path = Path(os.environ.get("OUT", "evals/results/gpu")) / f"{name}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.meta: dict[str, Any] = describe(arguments.device)
        self.rows: list[dict[str, Any]] = []
        self._absent: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._begun, self._seconds = time.monotonic(), arguments.seconds

    @property
    def out_of_time(self) -> bool:
        """Whether no further measurement should be started."""
        return self.used > 1.0

    @property
    def used(self) -> float:
        """Share of the time that is over."""
        return (time.monotonic() - self._begun) / self._seconds

    def add(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        self.save()

    def attempt(self, work: Callable[[], dict[str, Any]], **labels: Any) -> dict[str, Any] | None:
        """Run one measurement; an error becomes a row of its own, a peer that is not there one row in all."""
        kind = str(labels.get("kind", ""))
        if self.out_of_time or kind in self._absent:
            return None
        try:
            figures = work()
        except (Absent, ImportError) as error:
            self._absent.add(kind)
            self.add(kind=kind, absent=f"peer not present: {first_line(error)}")
            return None
        except Exception as error:  # whatever a kernel raises on a machine it has never seen
            self._failures[kind] += 1
            if kind and self._failures[kind] >= _MOST_FAILURES:
                self._absent.add(kind)
            self.add(**labels, error=f"{type(error).__name__}: {first_line(error)}")
            return None
        self._failures[kind] = -(10**6)  # it works; what fails from here on is about the shape
        self.add(**labels, **figures)
        return figures

    def guard(self, work: Callable[[], None], **labels: Any) -> None:
        """Run work that adds rows itself; an error becomes a row."""
        try:
            work()
        except Exception as error:
            self.add(**labels, error=f"{type(error).__name__}: {first_line(error)}")

    def extend(self, **values: Any) -> None:
        """Add to the last row what only follows from others."""
        self.rows[-1].update(values)
        self.save()

    def save(self) -> None:
        """Write everything so far."""
        self.path.write_text(json.dumps({"meta": self.meta, "rows": self.rows}, indent=1) + "\n")


def first_line(error: BaseException) -> str:
    """What an error says, short."""
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(device: str) -> dict[str, Any]:
    """Machine, versions and commit, and what a copy reaches in this process."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "absent"
    meta: dict[str, Any] = {"torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    meta["commit"] = done.stdout.strip() or os.environ.get("QUANTKIT_COMMIT", "unknown")
    if device != "cuda":
        return {
            **meta,
            "device": platform.processor() or "cpu",
            "rehearsal": True,
            "copy_bandwidth": copy_bandwidth(1 << 20, device),
        }
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
