"""How numbers are said in a diagnosis: two or three digits, with their unit."""

from __future__ import annotations


def milliseconds(seconds: float) -> str:
    """`1.23 ms`, `45 ms` or `1.2 s`."""
    if seconds >= 1:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{1000 * seconds:.3g} ms"


def megabytes(num_bytes: float) -> str:
    """`850 kB`, `12.3 MB` or `4.65 GB`, decimal like the bandwidths beside them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def percent(share: float) -> str:
    """`7.5 %` or `76 %`."""
    return f"{100 * share:.2g} %" if abs(share) < 0.095 else f"{100 * share:.0f} %"


def times(ratio: float) -> str:
    """`1.6x` or `12x`."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def count(number: float) -> str:
    """`12` or `14,300`, three digits."""
    if number < 100:
        return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
    digits = len(str(int(number))) - 3
    return f"{round(number, -digits):,.0f}"
