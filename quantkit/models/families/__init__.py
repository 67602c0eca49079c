"""What a model is, one file of data per family; `find` picks the one that a config.json asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import ModelError
from quantkit.models.family import Experts, Family
from quantkit.models.linear_sets import LinearSet, find_expert, split_experts
from quantkit.registry import Registry

__all__ = [
    "Experts",
    "Family",
    "LinearSet",
    "find",
    "find_compressible",
    "find_expert",
    "split_experts",
    "supported",
]

REGISTRY = Registry(package=__name__, attribute="FAMILY", noun="architecture")


def supported() -> dict[str, Family]:
    """Family by the class name that config.json carries."""
    return {name: data for data in REGISTRY.all().values() for name in data.hf_names}


def find(config: Mapping[str, Any]) -> Family:
    """The family that a model's config.json names.

    Raises:
        ModelError: config.json names none, or one that no file describes.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(
            "config.json has no 'architectures' entry, so the model's family is unknown; add its class name"
        )
    known = supported()
    for name in names:
        if name in known:
            return known[name]
    raise ModelError(f"architecture {names[0]!r} is not supported; supported: {', '.join(sorted(known))}")


def find_compressible(config: Mapping[str, Any]) -> Family:
    """As `find`, for the compress side.

    Raises:
        ModelError: config.json names none, one that no file describes, or one that can be run but not compressed.
    """
    found = find(config)
    if found.not_compressible is not None:
        raise ModelError(f"{config['architectures'][0]} can be run but not compressed: {found.not_compressible}")
    return found
