"""Gates as text: `metric[subject] comparison limit`, e.g. `recovery[demo_facts]>=97`."""

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quantkit.errors import GateError, suggestion
from quantkit.results.gates.metrics import IN_PER_CENT, METRICS
from quantkit.untrusted import shorten

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
PATTERN = re.compile(r"\s*([a-z0-9_]+)\s*(?:\[\s*([^\]]+?)\s*\])?\s*(>=|<=|>|<)\s*([-+.\d][-+.\deE]*)\s*(%?)\s*")
_MAX_LENGTH = 200
EXAMPLES = "recovery>=98.9, perplexity_ratio<=1.05, kl<=0.02, recovery[demo_facts]>=97"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One promise: `metric[subject] operator limit`."""

    text: str
    metric: str
    subject: str | None
    operator: str
    limit: float


def parse_gate(text: str) -> Gate:
    """Read one gate.

    Args:
        text: e.g. `recovery>=98.9`.
    Raises:
        GateError: not of this form, an unknown number, or a limit in another unit than the number's.
    """
    if len(text) > _MAX_LENGTH:  # spaces alone take the third power of their number
        raise GateError(f"gate {shorten(text)} has {len(text)} characters; at most {_MAX_LENGTH} are read")
    match = PATTERN.fullmatch(text)
    if match is None:
        raise GateError(f"gate {text!r} cannot be read; write a number, a comparison and a limit, e.g. {EXAMPLES}")
    name, subject, sign, written, percent = match.groups()
    if name not in METRICS:
        raise GateError(
            f"gate {text!r}: no number is called {name!r}{suggestion(name, METRICS)}; there are {', '.join(METRICS)}"
        )
    try:
        limit = float(written)
    except ValueError:
        raise GateError(f"gate {text!r}: {written!r} is not a number") from None
    # `top1>=98%` means the share 0.98; recovery is in per cent already.
    if percent and name not in IN_PER_CENT:
        limit /= 100
    metric = METRICS[name]
    if not metric.low <= limit <= metric.high:
        raise GateError(f"gate {text!r}: {name} is {metric.unit}, so a limit of {limit:g} is probably mistaken")
    # Written anew from what was read, so that equal gates are equal texts.
    plain = f"{name}[{subject}]" if subject else name
    return Gate(text=f"{plain}{sign}{limit:g}", metric=name, subject=subject, operator=sign, limit=limit)


def parse_gates(texts: Iterable[str]) -> tuple[Gate, ...]:
    """Read several gates; see `parse_gate`."""
    return tuple(parse_gate(text) for text in texts)
