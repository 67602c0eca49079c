"""Match names in bounded time with patterns: shell-style, or regular expressions after `re:`.

Patterns come from files that strangers may have written, and Python's `re` cannot be stopped: a ten-character pattern
can run longer than the age of the universe. The package `regex` has a timeout. Patterns that `regex` reads differently
from `re` are refused.
"""

import fnmatch
import functools
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from quantkit.errors import SchemeError
from quantkit.safety.untrusted import shorten

MAX_EXPRESSIONS = 4096
_MAX_LENGTH = 1000
_MAX_REPEATS = 10_000  # maximum product of all counts {n}, because the engine expands repeats when it compiles
_MAX_WAYS = 26  # largest base-2 logarithm of the number of ways to match a name
_MATCH_S = 1.0
_ALL_S = 30.0
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
# Finds fuzzy matching and named sets of characters: `regex` interprets them, `re` takes them literally.
_OTHER_MEANING = re.compile(r"\{(?!\d*,?\d*\})|\[\^?\[:")


@dataclass(slots=True)
class Budget:
    """Seconds left for matching all patterns of one file. *Mutable*."""

    seconds: float = _ALL_S


def is_exact(pattern: str) -> bool:
    """Whether a pattern is a plain name, without wildcards."""
    return not pattern.startswith("re:") and not set(pattern) & set("*?[")


def check_pattern(pattern: str) -> None:
    """Check that a text is a valid pattern.

    Raises:
        SchemeError: the pattern is too long or not a valid regular expression, or its repeat counts are too large.
    """
    if not is_exact(pattern):
        _compiled(pattern)


def matches(pattern: str, name: str, budget: Budget) -> bool:
    """Whether a pattern matches the whole name.

    Args:
        pattern: shell-style (`*.down_proj`), or a regular expression after `re:`.
        name: a full module name.
        budget: time left; reduced by this call.
    Raises:
        SchemeError: the pattern is not valid, or matching takes too long.
    """
    if is_exact(pattern):
        return pattern == name
    # CPU time of this thread: other work on the machine does not use up the budget.
    expression, start = _compiled(pattern), time.thread_time()
    try:
        # Never below zero, which `regex` takes as no limit.
        return expression.fullmatch(name, timeout=max(1e-6, min(_MATCH_S, budget.seconds))) is not None
    except (TimeoutError, MemoryError, RecursionError):
        raise SchemeError(
            f"pattern {shorten(pattern, 100)} takes too long to match {shorten(name)}; remove repeats inside repeats, "
            "or name the modules"
        ) from None
    finally:
        budget.seconds -= time.thread_time() - start


def check_for_others(config: Mapping[str, Any]) -> None:
    """Refuse regular expressions of a quantization_config that could hang other libraries.

    Other libraries match with `re`, which tries every way to divide a name among repeats and alternatives. So an
    expression may have only a few repeats and alternatives, and no repeated group.

    Args:
        config: contents of config.json.
    Raises:
        SchemeError: an expression may take too long; the message names it.
    """
    for text in _texts(config, False):
        # Escaped characters are literals, not operators.
        plain = re.sub(r"\\.", "", text)
        repeats, choices = len(re.findall(r"[*+{]", plain)), len(re.findall(r"\||(?<![(*+?}])\?", plain))
        # A repeat can end at any of about 2^6 characters of a name.
        if len(text) > _MAX_LENGTH or re.search(r"\)[*+{]", plain) or 6 * repeats + choices > _MAX_WAYS:
            raise SchemeError(
                f"quantization_config has the expression {shorten(text, 100)}, which may take forever to match; "
                "name the modules, or use few repeats and no repeated group"
            )


def _texts(data: Any, inside: bool) -> Iterator[str]:
    """Yield all texts inside every `quantization_config`, however deep it is nested."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            here = inside or key == "quantization_config"
            yield from [key] if inside else []
            yield from _texts(value, here)
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value, inside)
    elif inside and isinstance(data, str):
        yield data


@functools.lru_cache(maxsize=MAX_EXPRESSIONS)
def _compiled(pattern: str) -> regex.Pattern[str]:
    if len(pattern) > _MAX_LENGTH:
        raise SchemeError(
            f"pattern {shorten(pattern)} has {len(pattern)} characters; at most {_MAX_LENGTH} are allowed"
        )
    text = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
    try:
        # First Python's `re`: a pattern must be valid there, however `regex` reads it.
        re.compile(text)
        _check_meaning(text)
        # Version 0 is the behaviour of `re`; version 1 gives sets and case folding a different meaning.
        return regex.compile(text, regex.VERSION0)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        raise SchemeError(f"{shorten(pattern, 100)} is not a valid regular expression: {error}") from None


def _check_meaning(text: str) -> None:
    """Raise ValueError if the libraries `re` and `regex` may read the pattern differently, or if its repeat counts,
    such as `{1000}`, would fill the memory.
    """
    plain = re.sub(r"\\.", "", text, flags=re.DOTALL)
    if other := _OTHER_MEANING.search(plain):
        raise ValueError(f"{other[0]!r} means different things to different regex engines; escape it with backslashes")
    counts = (int(most or least or 1) for least, _, most in _COUNT.findall(plain))
    if math.prod(max(1, count) for count in counts) > _MAX_REPEATS:
        raise ValueError(f"the product of its counts in braces is over {_MAX_REPEATS}")
