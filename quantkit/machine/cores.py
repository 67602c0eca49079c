"""Number of cores that this process may use.

This module does not import torch, because OpenMP reads its settings when torch is imported.
"""

from collections.abc import Iterator
from pathlib import Path

from quantkit.machine.system import core_numbers

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return the number of cores that this process may use: the lower of affinity and cgroup quotas, at least 1."""
    allowed = len(core_numbers())
    quota = cgroup_quota()
    return allowed if quota is None else max(1, min(allowed, quota))


def cgroup_quota(root: Path = _CGROUPS, own: Path = _OWN) -> int | None:
    """Return the number of whole cores that cgroups (versions 1 and 2) allow this process, at least 1; None = no limit.

    Args:
        root: folder where cgroups are mounted.
        own: file in which Linux lists the groups of this process.
    """
    quotas = [quota for folder in _folders(root, own) if (quota := _quota(folder)) is not None]
    # Every group from the root to the process counts: systemd and Slurm set limits some levels below the root.
    return min(quotas, default=None)


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders that may hold a quota: the mounts, and the groups of this process from the lowest up."""
    mounts = {"cpu": (root / "cpu",), "": (root, root / "unified")}
    for several in mounts.values():
        yield from several
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux, or /proc is not mounted
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        names = [part for part in path.split("/") if part]
        # Version 2 names no controllers. A path with ".." is above what this container sees.
        for controller in {"cpu", ""}.intersection(controllers.split(",")) if ".." not in names else ():
            for mount in mounts[controller]:
                yield from (mount.joinpath(*names[:end]) for end in range(len(names), 0, -1))


def _quota(folder: Path) -> int | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        # Rounded down: one thread too many would use up the quota early, and then all threads would wait.
        return max(1, int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # not there, or "max"
        return None
