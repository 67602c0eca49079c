"""A setting: a dataclass field that says what it means, and what the command line offers for it, once.

Nothing heavy and no click: `--help` is answered from classes of such fields, which any layer may have.
"""

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, **option: Any) -> Any:
    """A field with its description; with `flag` it is an option of the commands that fill the class.

    Args:
        default: value if nothing is given. A tuple's option is repeatable.
        text: what it means, as `--help` prints it.
        option: what the option is and accepts: `flag` (`--seed`, `-o --output FILE`, `--bos/--no-bos`);
            `choices`; the bounds `minimum`, `maximum`, `above` and `below` (without the bound itself); `kind`, the type
            of a value where neither default nor bounds tell; `commas` for several values in one, `1,8`; `read`, which
            makes the value of the text that was given; `shown`, printed as the default.
    """
    return field(default=default, metadata={"text": text, **option})
