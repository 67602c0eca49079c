"""Settings: dataclass fields that carry their description and their command-line option.

This module imports neither click nor anything slow, so that any layer can use it and `--help` stays fast.
"""

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, **option: Any) -> Any:
    """Define a dataclass field with its description. If `flag` is given, commands can offer the field as an option.

    Args:
        default: default value of the field. If it is a tuple, the option is repeatable.
        text: description, as `--help` prints it.
        option: properties of the option: `flag` (`--seed`, `-o --output FILE`, `--bos/--no-bos`); `choices`; the
            inclusive bounds `minimum` and `maximum` and the exclusive bounds `above` and `below`; `kind`, the type of a
            value, needed if default and bounds do not determine the type; `commas`, true if one argument may list
            several values, as in `1,8`; `read`, a function that parses the text; `shown`, the default that `--help`
            prints.
    """
    return field(default=default, metadata={"text": text, **option})
