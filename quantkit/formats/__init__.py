"""On-disk formats: one module per format, for reading and writing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError
from quantkit.registry import Registry

if TYPE_CHECKING:
    from quantkit.formats.base import Format
    from quantkit.numerics.scheme import Scheme

__all__ = ["GGUF_MAGIC", "REGISTRY", "SECTIONS", "is_gguf", "recognise", "writable"]

REGISTRY = Registry(package=__name__, attribute="FORMAT", noun="format")


GGUF_MAGIC = b"GGUF"
# Entries of config.json that describe quantized weights; MLX has both.
SECTIONS = ("quantization_config", "quantization")


def is_gguf(path: Path) -> bool:
    """Whether this is a file whose name or first bytes identify it as GGUF."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return path.suffix == ".gguf" or file.read(4) == GGUF_MAGIC
    return False


def recognise(config: Mapping[str, Any], where: str) -> tuple[Format, Scheme] | None:
    """Return the format and the scheme that a config.json describes; None for an unquantized model.

    Args:
        config: contents of config.json.
        where: path of config.json, for messages.
    Returns:
        The format, and the scheme of every linear.
    Raises:
        SchemeError: the format is known, but this variant of it cannot be decoded.
        CheckpointError: no format reads this quantization method.
    """
    for known in REGISTRY.all().values():
        scheme = known.recognise(config)
        if scheme is not None:
            return known, scheme
    described = config.get("quantization_config")
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, Mapping) else described
    raise CheckpointError(
        f"{where}: quantization method {method!r} is not supported; supported: {', '.join(REGISTRY.names())}"
    )


def writable(fits: Callable[[Format], bool]) -> str:
    """Return the names of the formats that a recipe can name and for which `fits` is true, as text for messages."""
    formats = REGISTRY.all().items()
    return ", ".join(name for name, of in formats if of.is_written and of.is_recipe_format and fits(of))
