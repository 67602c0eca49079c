"""Format and parse amounts for people: numbers, shares, bytes and times.

Values that are None or NaN are written as a dash. Examples of texts that are parsed: `24GiB`, `4.3TB/s`, `780TFLOP/s`,
`32k`, `7B`, `30B-A3B`.
"""

import math
import re

from quantkit.errors import InputError

MISSING = "-"
GROUP_SIZES = (128, 64, 32)
"""Group sizes (inputs per scale) that all common engines have kernels for, the largest first."""
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BYTES = {**_DECIMAL, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_PARAMETERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype without the prefix `torch.`, such as `bfloat16`; accepts a dtype or its name."""
    return str(dtype).removeprefix("torch.")


def fitting_group(size: int, width: int) -> int:
    """Return a group size that divides the number of inputs of a linear: the requested size if possible, otherwise the
    largest smaller size that engines support.

    Args:
        size: requested group size.
        width: number of inputs of the linear.
    Returns:
        The chosen size; if neither the requested size nor a smaller one in `GROUP_SIZES` fits, the requested size.
    """
    smaller = (other for other in GROUP_SIZES if other < size and width % other == 0)
    return size if width % size == 0 else next(smaller, size)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with this many significant digits, thousands separated: `0.0123`, `12.0`, `1,234`."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def short(value: float | None, digits: int = 3) -> str:
    """Format a number as `number` does, but without trailing zeros: `12`, `3.5`, `1,234`."""
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def percent(value: float | None, digits: int = 1) -> str:
    """Format a number that is already in per cent: `98.9 %`."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f} %"


def as_percent(share: float) -> str:
    """Format a share, such as 0.76, in per cent with two digits: `7.5 %` or `76 %`."""
    return f"{100 * share:.2g} %" if abs(share) < 0.095 else f"{100 * share:.0f} %"


def counted(count: int, noun: str) -> str:
    """Format a count with a noun, which is given in the singular: `1 gate`, `12,000 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def signed(value: float | None, digits: int = 3) -> str:
    """Format a difference with its sign and this many decimals: `-0.013`."""
    return MISSING if value is None or math.isnan(value) else f"{value:+.{digits}f}"


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """Format an interval: `98.7 to 100.9`."""
    return MISSING if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def times(ratio: float) -> str:
    """Format a ratio: `1.6x` or `12x`."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def byte_size(num_bytes: float | None) -> str:
    """Format bytes in the largest binary unit in which the number is at least 1: `1.5 GiB`, `12 bytes`."""
    if num_bytes is None:
        return MISSING
    if num_bytes < 1024:
        return f"{num_bytes:.0f} byte{'' if num_bytes == 1 else 's'}"
    power = 1
    # The number is rounded first, because 1023.96 KiB would be printed as 1024.0 KiB.
    while round(num_bytes / 1024**power, 1) >= 1024 and power < len(_BINARY_UNITS):
        power += 1
    return f"{num_bytes / 1024**power:.1f} {_BINARY_UNITS[power - 1]}"


def decimal_bytes(num_bytes: float) -> str:
    """Format bytes in decimal units, which are usual for bandwidths: `850 kB`, `12.3 MB` or `4.65 GB`."""
    size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= pair[0]), (1e3, "kB"))
    return f"{short(num_bytes / size)} {unit}"


def duration(seconds: float | None) -> str:
    """Format a latency with three digits: `31.0 us`, `0.310 ms`, `42.1 ms`, `1.25 s`."""
    if seconds is None:
        return MISSING
    if abs(seconds) >= 1 or seconds == 0:
        return f"{number(seconds)} s"
    return f"{number(1e3 * seconds)} ms" if abs(seconds) >= 1e-4 else f"{number(1e6 * seconds)} us"


def elapsed(seconds: float) -> str:
    """Format a running time: `4.2 s`, `42 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def scaled_count(count: float) -> str:
    """Format a count of parameters: `8.03 B`, `37.0 B`, `671 B`, `1.20 M`."""
    for size, unit in _COUNTS:
        if count >= size:
            return f"{number(count / size)} {unit}"
    return f"{count:.0f}"


def rounded_count(count: float) -> str:
    """Format a count with three significant digits: `12` or `14,300`."""
    if count < 100:
        return f"{count:.0f}" if count >= 10 else f"{count:.2g}"
    digits = len(str(int(count))) - 3
    return f"{round(count, -digits):,.0f}"


def parse_bytes(size: int | str, what: str = "memory") -> int:
    """Parse bytes: `24GiB` is 24 * 2^30, `24GB` is 24 * 10^9, a plain number is bytes.

    Args:
        size: the text, or a number of bytes.
        what: name of the quantity, for messages.
    Raises:
        InputError: the text is not a number of bytes, or the number is below 1.
    """
    text = "" if isinstance(size, bool) else str(size)
    amount = round(_amount(text, r"(?i)([kmgtp]?|[kmgt]i)b?", _BYTES, what, "24GiB or 24GB"))
    if amount < 1:
        raise InputError(f"{what} {size!r} is less than one byte; write it as 24GiB or 24GB")
    return amount


def parse_rate(text: str) -> float:
    """Parse a bandwidth in bytes per second: `4.3TB/s`; the `/s` is optional.

    Raises:
        InputError: the text is not a bandwidth.
    """
    return _amount(text, r"(?i)([kmgtp]?|[kmgt]i)b?(?:/s)?", _BYTES, "bandwidth", "4.3TB/s or 40GB/s")


def parse_flops(text: str) -> float:
    """Parse a number of operations per second: `780TFLOP/s`, `780T`.

    Raises:
        InputError: the text is not such a number.
    """
    return _amount(text, r"(?i)([kmgtp]?)(?:flops?|flop/s|ops)?", _DECIMAL, "peak", "780TFLOP/s")


def parse_tokens(text: str, name: str = "context") -> int:
    """Parse a number of tokens; `32k` is 32 * 1024, as usual for context lengths.

    Args:
        text: text to parse.
        name: name of the quantity, for messages.
    Raises:
        InputError: the text is not a positive number of tokens.
    """
    tokens = _amount(text, r"(?i)([km]?)", {"": 1, "k": 2**10, "m": 2**20}, name, "4096, 32k or 1M")
    if tokens < 1 or tokens != int(tokens):
        raise InputError(f"{name} {text!r} is not a positive whole number of tokens; write it as 4096, 32k or 1M")
    return int(tokens)


def parse_budget(value: int | float | str) -> int | float:
    """Parse a budget: a number of tokens, such as `2048` or `2k`, or a share below 1, such as `25%` or `0.25`.

    Raises:
        InputError: the text is neither a number of tokens nor such a share.
    """
    text = str(value).strip()
    share = text.removesuffix("%")
    try:
        amount = float(share) / (1 if share == text else 100)
    except ValueError:
        amount = 1.0
    if 0 < amount < 1:
        return amount
    if share != text or amount < 1 or not math.isfinite(amount):
        raise InputError(
            f"budget {text!r} is neither a number of tokens nor a share below 100%; write it as 2048, 2k or 25%"
        )
    return parse_tokens(text)


def parse_parameters(text: str) -> tuple[float, float]:
    """Parse the number of parameters in total and per token: `7B` is (7e9, 7e9), `30B-A3B` is (30e9, 3e9).

    Raises:
        InputError: the text is not a number of parameters, or a token uses more parameters than exist.
    """
    total, dash, active = text.partition("-")
    if dash and active[:1] not in ("a", "A"):
        raise InputError(f"{text!r} is not a number of parameters; write it as 7B or 30B-A3B")
    numbers = [
        _amount(part, r"(?i)([kmbt]?)", _PARAMETERS, "parameters", "7B, 350M or 30B-A3B")
        for part in ([total, active[1:]] if dash else [total])
    ]
    if numbers[0] < 1 or numbers[-1] > numbers[0] or numbers[-1] < 1:
        raise InputError(
            f"parameters {text!r}: {numbers[-1]:g} of {numbers[0]:g} parameters are used per token; at least 1 must "
            "be, and at most all; write it as 7B or 30B-A3B"
        )
    return numbers[0], numbers[-1]


def _amount(text: str, unit: str, factors: dict[str, int], noun: str, examples: str) -> float:
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(.*?)\s*", text)
    prefix = re.fullmatch(unit, number[2]) if number else None
    if number is None or prefix is None:
        raise InputError(f"{noun} {text!r} is not an amount; write it as {examples}")
    return float(number[1]) * factors[prefix[1].lower()]
