"""Byte counts for people."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(num_bytes: int) -> str:
    """A byte count in the largest binary unit that keeps it at one or more, e.g. `1.5 GiB` or `12 bytes`.

    Args:
        num_bytes: >= 0.
    """
    if num_bytes < 1024:
        return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"
    size = float(num_bytes)
    for unit in _UNITS:
        size /= 1024
        # 1023.96 would be printed as 1024.0, which is one of the next unit.
        if round(size, 1) < 1024 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"
