"""Amounts as people write and read them: `24GiB`, `4.3TB/s`, `780TFLOP/s`, `32k`, `7B`, `30B-A3B`, `42.1 ms`."""

from __future__ import annotations

import re

from quantkit.errors import InputError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BINARY_NAMES = ("KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_bytes(size: int | str) -> int:
    """Bytes: `24GiB` is 24 * 2^30, `24GB` is 24 * 10^9, a plain number is bytes.

    Raises:
        InputError: not an amount of at least one byte.
    """
    units, text = {**_DECIMAL, **_BINARY}, "" if isinstance(size, bool) else str(size)
    amount = round(_amount(text, r"(?i)([kmgtp]?|[kmgt]i)b?", units, "memory", "24GiB or 24GB"))
    if amount < 1:
        raise InputError(f"memory {size!r} is less than a byte; write it as 24GiB or 24GB")
    return amount


def parse_rate(text: str) -> float:
    """Bytes per second: `4.3TB/s`; the `/s` may be left out.

    Raises:
        InputError: not a rate.
    """
    units = {**_DECIMAL, **_BINARY}
    return _amount(text, r"(?i)([kmgtp]?|[kmgt]i)b?(?:/s)?", units, "bandwidth", "4.3TB/s or 40GB/s")


def parse_flops(text: str) -> float:
    """Operations per second: `780TFLOP/s`, `780T`.

    Raises:
        InputError: not a rate.
    """
    return _amount(text, r"(?i)([kmgtp]?)(?:flops?|flop/s|ops)?", _DECIMAL, "peak", "780TFLOP/s")


def parse_tokens(text: str) -> int:
    """A number of tokens; here `32k` is 32 * 1024, as context lengths are called.

    Raises:
        InputError: not a positive number of tokens.
    """
    tokens = _amount(text, r"(?i)([km]?)", {"": 1, "k": 2**10, "m": 2**20}, "context", "4096, 32k or 1M")
    if tokens < 1 or tokens != int(tokens):
        raise InputError(f"context {text!r} is not a whole number of tokens above zero; write it as 4096, 32k or 1M")
    return int(tokens)


def parse_parameters(text: str) -> tuple[float, float]:
    """Parameters in total and per token: `7B` is (7e9, 7e9), `30B-A3B` is (30e9, 3e9).

    Raises:
        InputError: not a number of parameters, or more active than there are.
    """
    total, dash, active = text.partition("-")
    if dash and active[:1] not in ("a", "A"):
        raise InputError(f"parameters {text!r} are not a number of parameters; write them as 7B or 30B-A3B")
    numbers = [
        _amount(part, r"(?i)([kmbt]?)", _COUNTS, "parameters", "7B, 350M or 30B-A3B")
        for part in ([total, active[1:]] if dash else [total])
    ]
    if numbers[0] < 1 or numbers[-1] > numbers[0] or numbers[-1] < 1:
        raise InputError(f"parameters {text!r}: {numbers[-1]:g} active of {numbers[0]:g}; write them as 7B or 30B-A3B")
    return numbers[0], numbers[-1]


def _amount(text: str, unit: str, factors: dict[str, int], noun: str, examples: str) -> float:
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(.*?)\s*", text)
    found = re.fullmatch(unit, number[2]) if number else None
    if number is None or found is None:
        raise InputError(f"{noun} {text!r} is not an amount; write it as {examples}")
    return float(number[1]) * factors[found[1].lower()]


def human_count(count: float) -> str:
    """A count for people: `8.03 B`, `37.0 B`, `671 B`, `1.2 M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            digits = 0 if count >= 100 * size else 1 if count >= 10 * size else 2
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f}"


def human_time(seconds: float) -> str:
    """A duration for people: `0.97 ms`, `42.1 ms`, `1.2 s`, `3.1 us`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} us"


def human_bytes(num_bytes: int) -> str:
    """A byte count in the largest binary unit that keeps it at one or more, e.g. `1.5 GiB` or `12 bytes`.

    Args:
        num_bytes: >= 0.
    """
    if num_bytes < 1024:
        return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"
    size = float(num_bytes)
    for unit in _BINARY_NAMES:
        size /= 1024
        # 1023.96 would be printed as 1024.0, which is one of the next unit.
        if round(size, 1) < 1024 or unit == _BINARY_NAMES[-1]:
            break
    return f"{size:.1f} {unit}"
