"""A control group of processes with a limit of memory, where the machine lets one be made."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The limit, what is used, the most that was used, and the count of kills: of version 1, and of version 2.
FILES = {
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    "memory.max": ("memory.current", "memory.peak", "memory.events"),
}
PARENTS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path]:
    """The file with its limit; the test is skipped where none can be made."""
    for parent, limit in PARENTS.items():
        group = Path(parent) / f"quantkit-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                break
            group.rmdir()
    else:
        pytest.skip("no control group with a limit of memory can be made here")
    try:
        yield group / limit
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """A killed process stays in its group until the kernel has given back its memory."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)
    return group.rmdir()


def join(limit: Path) -> None:
    """This process, from now on."""
    limit.with_name("cgroup.procs").write_text(str(os.getpid()))


def used(limit: Path) -> int:
    """Bytes that its processes have."""
    return int(limit.with_name(FILES[limit.name][0]).read_text())


def most_used(limit: Path) -> int:
    """Bytes that its processes had, at most."""
    return int(limit.with_name(FILES[limit.name][1]).read_text())


def kills(limit: Path) -> int:
    """How many of its processes the kernel has killed for want of memory."""
    lines = limit.with_name(FILES[limit.name][2]).read_text().splitlines()
    return int(dict(line.split() for line in lines)["oom_kill"])
