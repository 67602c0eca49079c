"""Amounts as people read them: the one way in which numbers, shares, bytes and times are written, wherever they stand.

What is not known is a dash. The inverse, reading what people write, is `quantkit.planning.units`.
"""

from __future__ import annotations

import math

MISSING = "-"
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, digits: int = 3) -> str:
    """So many significant digits, thousands separated: `0.0123`, `12.0`, `1,234`."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def short(value: float | None, digits: int = 3) -> str:
    """`number` without zeros at its end: `12`, `3.5`, `1,234`."""
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def percent(value: float | None, digits: int = 1) -> str:
    """A number that already is in per cent: `98.9 %`."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f} %"


def as_percent(share: float) -> str:
    """A share of 1 in two digits: `7.5 %` or `76 %`."""
    return f"{100 * share:.2g} %" if abs(share) < 0.095 else f"{100 * share:.0f} %"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign and so many digits after the point: `-0.013`."""
    return MISSING if value is None or math.isnan(value) else f"{value:+.{digits}f}"


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """`98.7 to 100.9`."""
    return MISSING if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def times(ratio: float) -> str:
    """`1.6x` or `12x`."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def byte_size(num_bytes: float | None) -> str:
    """In the largest binary unit that keeps it at one or more: `1.5 GiB`, `12 bytes`."""
    if num_bytes is None:
        return MISSING
    if num_bytes < 1024:
        return f"{num_bytes:.0f} byte{'' if num_bytes == 1 else 's'}"
    power = 1
    # 1023.96 would be printed as 1024.0, which is one of the next unit.
    while round(num_bytes / 1024**power, 1) >= 1024 and power < len(_BINARY_UNITS):
        power += 1
    return f"{num_bytes / 1024**power:.1f} {_BINARY_UNITS[power - 1]}"


def decimal_bytes(num_bytes: float) -> str:
    """`850 kB`, `12.3 MB` or `4.65 GB`, decimal like the bandwidths beside them."""
    size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= pair[0]), (1e3, "kB"))
    return f"{short(num_bytes / size)} {unit}"


def duration(seconds: float | None) -> str:
    """A latency in three digits: `31.0 us`, `0.310 ms`, `42.1 ms`, `1.25 s`."""
    if seconds is None:
        return MISSING
    if abs(seconds) >= 1 or seconds == 0:
        return f"{number(seconds)} s"
    return f"{number(1e3 * seconds)} ms" if abs(seconds) >= 1e-4 else f"{number(1e6 * seconds)} us"


def elapsed(seconds: float) -> str:
    """How long something took or will take: `4.2 s`, `42 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def scaled_count(count: float) -> str:
    """`8.03 B`, `37.0 B`, `671 B`, `1.20 M`."""
    for size, unit in _COUNTS:
        if count >= size:
            return f"{number(count / size)} {unit}"
    return f"{count:.0f}"


def rounded_count(count: float) -> str:
    """`12` or `14,300`: three digits of something counted."""
    if count < 100:
        return f"{count:.0f}" if count >= 10 else f"{count:.2g}"
    digits = len(str(int(count))) - 3
    return f"{round(count, -digits):,.0f}"
