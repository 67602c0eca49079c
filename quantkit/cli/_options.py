"""Options that belong together, added to a command in one line and handed to it in one dict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def option_group(
    argument: str, *options: Decorator, collect: Callable[[dict[str, Any]], Any] = lambda values: values
) -> Decorator:
    """Options that a command gets together.

    Args:
        argument: under which the command gets their values, by name.
        options: made by `click.option`, in the order of the help.
        collect: what becomes of the values before.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            function(*args, **{argument: collect(values)}, **given)

        decorated: Any = command
        for option in reversed(options):
            decorated = option(decorated)
        # Click keeps options on the function, the last one first; wraps() has handed over those of before.
        names = [parameter.name for parameter in decorated.__click_params__[-len(options) :]]
        return command

    return decorate
