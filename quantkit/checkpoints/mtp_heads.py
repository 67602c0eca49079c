"""Find the multi-token prediction (MTP) heads that the files of a checkpoint hold."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import ModelError
from quantkit.models.description import ModelDescription, describe
from quantkit.models.families import find_language_model
from quantkit.models.mtp import MTP, MTPHead, mtp_heads, mtp_prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHeads:
    """MTP heads in the files of a checkpoint.

    Args:
        prefixes: prefixes of the names of all tensors of MTP heads.
        heads: the heads; empty if the files have none or the family does not describe its heads.
        model: description of the model; None if no family file describes it.
        data: the family's description of its heads; None = it has no such description.
    """

    prefixes: tuple[str, ...] = ()
    heads: tuple[MTPHead, ...] = ()
    model: ModelDescription | None = None
    data: MTP | None = None


def find_heads(config: Mapping[str, Any], names: Collection[str]) -> StoredHeads:
    """Return the MTP heads of a checkpoint.

    Args:
        config: contents of config.json.
        names: names of the checkpoint's tensors.
    """
    try:
        family, inner = find_language_model(config)
        model = describe(inner, family)
        heads = mtp_heads(model, names)
        prefixes = tuple(prefix for prefix in mtp_prefixes(model) if any(name.startswith(prefix) for name in names))
    except (ModelError, TypeError):  # quantkit does not know the family, or config.json lacks entries
        return StoredHeads()
    return StoredHeads(prefixes=prefixes, heads=heads, model=model, data=family.mtp)


def unquantized_prefixes(
    config: Mapping[str, Any], names: Collection[str], quantized: Iterable[str]
) -> tuple[str, ...]:
    """Return the name prefixes of the MTP heads that have no quantized linear.

    Args:
        config: contents of config.json.
        names: names of the checkpoint's tensors.
        quantized: full names of the quantized linears.
    """
    taken = tuple(quantized)
    prefixes = find_heads(config, names).prefixes
    return tuple(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in taken))
