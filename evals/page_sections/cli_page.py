"""Make the tables of options in docs/cli.md from the commands themselves; for evals/pages.py."""

from __future__ import annotations

import re

import click
from provenance import table

from quantkit.cli import REGISTRY
from quantkit.cli._options import settings_of
from quantkit.runtime.config import EngineConfig

EVERYWHERE = {"--json", "--quiet", "--verbose", "--help"}
ENGINE = {word for field in settings_of(EngineConfig).values() for word in field.metadata["flag"].split()}
HEAD = ("Option", "Default", "Does")
SHARED = "The [options of the engine](#options-of-the-engine) apply too."
WORDS = {"required", "none", "all", "measured"}  # defaults that are words, not values


def sections() -> dict[str, str]:
    """Return the generated sections of the page, keyed by name: `engine`, and one per command that has options."""
    commands = {name: list(_options(REGISTRY.load(name))) for name in REGISTRY.names()}
    engine = [option for option in commands["generate"] if option.opts[-1] in ENGINE]
    return {"engine": _table(engine)} | {name: _section(options) for name, options in commands.items() if options}


def _options(command: click.Command) -> list[click.Option]:
    """Return a command's options, except the options that all commands have."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    return [option for option in options if option.opts[-1] not in EVERYWHERE]


def _section(options: list[click.Option]) -> str:
    """Return the table of a command; a sentence replaces the engine's options, which many commands have."""
    engine = [option for option in options if option.opts[-1] in ENGINE]
    if len(engine) < len(ENGINE):
        return _table(options)
    return f"{_table([option for option in options if option not in engine])}\n\n{SHARED}"


def _table(options: list[click.Option]) -> str:
    return table(HEAD, map(_cells, options))


def _cells(option: click.Option) -> tuple[str, str, str]:
    """Return the row of an option: what `--help` says, with the default in a separate column and without ranges."""
    record = option.get_help_record(click.Context(click.Command("any")))
    assert record is not None, option.name
    flags, text = record
    does, *notes = re.split(r"  (?=\[)", text)
    notes = [note.strip("[]") for note in notes]
    default = next((note.removeprefix("default: ") for note in notes if re.match("default: |required", note)), "")
    assert "<" not in does, f"{flags}: {does}"  # it would be read as HTML
    return _flags(flags), _code(default), does


def _flags(text: str) -> str:
    """Return flags such as `-o, --output DIR` as code, one by one; numbers become N, choices lose their brackets."""
    text = re.sub(r"(?:INTEGER|FLOAT)(?: RANGE)?", "N", text)
    text = re.sub(r" \[([^\]]*)\]$", r" \1", text).replace("|", r"\|")
    return ", ".join(f"`{flag.strip()}`" for flag in re.split(r", (?=-)| / ", text))


def _code(default: str) -> str:
    return default if " " in default or default in WORDS else f"`{default}`" if default else ""
