"""Compressions that are killed: after their first layer, at their n-th rename, before or after it, or inside a layer.

Every commit point of a run is a rename.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import quantkit
from quantkit.compress.calibration.layer import LayerContext
from tests.memory_cgroup import join, used


class Killed(Exception):
    """Raised by `KillAfterFirst`."""


class KillAfterFirst:
    """A listener that dies once the first layer is on disk."""

    def __getattr__(self, name):
        return lambda *arguments: None

    def layer_finished(self, record):
        raise Killed


class AfterFirst(KillAfterFirst):
    """A listener that does something once the first layer is on disk."""

    def __init__(self, act):
        self.act = act

    def layer_finished(self, record):
        if record.index == 0:
            self.act()


class Renames:
    """Counts them, and ends the process at one."""

    def __init__(self, moment: int, when: str):
        self.moment, self.when, self.count = moment, when, 0

    def patch(self, name: str) -> None:
        original = getattr(Path, name)

        def counted(path, target):
            self.count += 1
            self.kill("before")
            result = original(path, target)
            self.kill("after")
            return result

        setattr(Path, name, counted)

    def kill(self, when: str) -> None:
        if (self.count, when) == (self.moment, self.when):
            os.kill(os.getpid(), signal.SIGKILL)


def renames_file(output: Path) -> Path:
    """Where the number of renames of a whole run is written."""
    return output.parent / "renames"


def compress(moment: int, when: str, model: Path, output: Path, text: Path) -> None:
    """Run one compression that is killed at that moment."""
    renames = Renames(moment, when)
    renames.patch("replace")
    renames.patch("rename")
    _compress(model, output, text)
    renames_file(output).write_text(str(renames.count))


def compress_until_stage(number: int, model: Path, output: Path, text: Path) -> None:
    """Run one compression that is killed when statistics are to be gathered for that time."""
    observe, numbers = LayerContext.observe, itertools.count(1)

    def counted(*arguments: Any) -> Any:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return observe(*arguments)

    LayerContext.observe = counted  # type: ignore[method-assign]
    _compress(model, output, text)


def compress_until_memory_is_full(limit: Path, model: Path, output: Path, text: Path) -> None:
    """Once the first layer is on disk, want more memory than the group of this process may have."""
    join(limit)

    def hoard() -> None:
        limit.write_text(str(used(limit) + (8 << 20)))
        raise AssertionError(f"{len(os.urandom(64 << 20))} bytes fit")

    _compress(model, output, text, listener=AfterFirst(hoard))


def compress_in_group(limit: Path, num_bytes: int | None, model: Path, output: Path, text: Path) -> None:
    """In a group of processes that may have so many bytes in all."""
    join(limit)
    if num_bytes is not None:
        limit.write_text(str(num_bytes))
    _compress(model, output, text)


def _compress(model: Path, output: Path, text: Path, **options: Any) -> None:
    small = {"calibration.data": str(text), "calibration.samples": 8, "calibration.sequence_length": 48}
    quantkit.quantize(model, "gptq-int4", output, overrides={"weights.group_size": 32, **small}, **options)
