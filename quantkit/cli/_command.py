"""Commands whose docstring is the whole of their help: what begins at the first `\\b` is printed below the options."""

from __future__ import annotations

import inspect
from typing import Any

import click


class Command(click.Command):
    """A command that tells its examples last.

    Args:
        help: the docstring; click keeps the lines of a paragraph that begins with `\\b` as they are.
        epilog: printed before them, in the same paragraph.
    """

    def __init__(self, name: str | None, *, help: str | None = None, epilog: str = "\b", **settings: Any) -> None:
        text, _, below = inspect.cleandoc(help or "").partition("\b\n")
        super().__init__(name, help=text.rstrip(), epilog=f"{epilog}\n{below}", **settings)


class CommandGroup(Command, click.Group):
    """A group of such commands."""

    command_class = Command
