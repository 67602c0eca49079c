"""On-disk formats: one module per format, for reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError
from quantkit.registry import Registry

if TYPE_CHECKING:
    from quantkit.formats.base import Format
    from quantkit.numerics.scheme import Scheme

__all__ = ["REGISTRY", "recognise", "writable"]

REGISTRY = Registry(package=__name__, attribute="FORMAT", noun="format")


def recognise(config: Mapping[str, Any], where: str) -> tuple[Format, Scheme] | None:
    """The format that a config.json describes; None when it describes an ordinary model.

    Args:
        config: contents of config.json.
        where: its path, for messages.
    Returns:
        the format, and the scheme of every linear.
    Raises:
        SchemeError: a known format, of a kind that cannot be decoded.
        CheckpointError: a method that no format reads.
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
        f"{where}: quantization_config is of method {method!r}, which no known format reads; "
        f"known: {', '.join(REGISTRY.names())}"
    )


def writable(fits: Callable[[Format], bool]) -> str:
    """List the writable formats for which `fits` is true, for messages."""
    return ", ".join(name for name, known in REGISTRY.all().items() if known.is_written and fits(known))
