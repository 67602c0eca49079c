"""What commands that run something share: the options of the bundled engine, and lists of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from quantkit.cli._options import Decorator, option_group
from quantkit.runtime.config import EngineConfig


def _option(field: dataclasses.Field[Any]) -> Decorator:
    """A field as an option of its name; its metadata is described where the fields are."""
    meta = field.metadata
    accepted: Any = None
    if "choices" in meta:
        accepted = click.Choice(meta["choices"])
    elif "minimum" in meta:
        accepted = click.IntRange(min=meta["minimum"])
    shown = f"  [default: {meta['shown']}]" if "shown" in meta else ""
    return click.option(
        meta["flag"],
        field.name,
        type=accepted,
        default=field.default,
        show_default=field.default is not None,
        metavar=meta.get("metavar"),
        help=meta["help"] + shown,
    )


runtime_options = option_group(
    "engine", *(_option(field) for field in dataclasses.fields(EngineConfig) if "flag" in field.metadata)
)
"""Options of the engine, keywords of `LLM`: the fields of `EngineConfig` that have a flag."""


def numbers(kind: type, name: str) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """A callback that reads `1,8,32`."""

    def read(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        if text is None:
            return None
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of {name} such as 1,8") from None
        if not all(0 < value < float("inf") for value in values):
            raise click.BadParameter(f"{text!r}: every one of the {name} must be above 0")
        return values

    return read
