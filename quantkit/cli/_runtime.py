"""What commands that run something share: the options of the bundled engine, and lists of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from quantkit.cli._options import option_group

KV_TYPES = ("auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4")


runtime_options = option_group(
    "engine",
    click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:i]", help="Where to compute."),
    click.option(
        "--dtype", default="auto", show_default=True, metavar="auto|bf16|fp16|fp32", help="Arithmetic to compute in."
    ),
    click.option(
        "--kv-cache",
        type=click.Choice(KV_TYPES),
        default="auto",
        show_default=True,
        help="Number type of keys and values in the cache.",
    ),
    click.option(
        "--kv-memory",
        "memory",
        metavar="SIZE",
        help="Memory for the KV cache, e.g. 4GiB.  [default: what the model can use]",
    ),
    click.option("--max-length", type=click.IntRange(min=1), help="Longest context in tokens.  [default: the model's]"),
    click.option(
        "--head",
        "head_dtype",
        type=click.Choice(["int8", "int4"]),
        help="Round the output head too, which recipes leave as it is.",
    ),
    click.option("--speculate", metavar="ngram|MODEL", help="Guess several tokens per step; the text stays the same."),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads to compute with.  [default: measured]"),
)
"""Options of the engine, keywords of `LLM`."""


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
