"""Settings: dataclass fields with their description and command-line option.

This module imports neither click nor anything slow, so that any layer can use it and `--help` stays fast.
"""

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, **option: Any) -> Any:
    """Define a field with its description. If `flag` is given, commands that create the class get an option for it.

    Args:
        default: default value. If it is a tuple, the option is repeatable.
        text: description, as `--help` prints it.
        option: properties of the option: `flag` (`--seed`, `-o --output FILE`, `--bos/--no-bos`); `choices`; the
            inclusive bounds `minimum` and `maximum` and the exclusive bounds `above` and `below`; `kind`, the type of a
            value if default and bounds do not determine it; `commas` for several values in one, `1,8`; `read`, a
            function that parses the text; `shown`, printed as the default.
    """
    return field(default=default, metadata={"text": text, **option})
