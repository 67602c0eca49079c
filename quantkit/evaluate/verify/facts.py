"""What a report says of models and machine: found on disk and in the system, nothing is run."""

import contextlib
import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import ModelError, ReportError
from quantkit.evaluate.verify.pair import Pair
from quantkit.hub import card_entries
from quantkit.inspection import inspect
from quantkit.machine.devices import processor_name
from quantkit.registry import installed_version
from quantkit.results import CompressionResult, Environment, ModelFacts

_PACKAGES = ("quantkit", "torch", "transformers", "safetensors", "lm-eval", "compressed-tensors")


def model_facts(path: Path, name: str) -> ModelFacts:
    """Sizes and number types of a model.

    Args:
        path: its directory.
        name: as it should be printed; the id on the hub where it is one.
    """
    summary = inspect(path)
    # The scheme is named after the largest kind of linear; embedding and head may be stored otherwise.
    linears = [row for row in summary.modules if row.kind not in ("embedding", "norms", "head")]
    largest = max(linears, key=lambda row: row.num_parameters, default=None)
    alike = ("format", "num_parameters", "num_bytes", "bits_per_weight", "architecture", "engines")
    return ModelFacts(
        name=name,
        path=str(path),
        **{fact: getattr(summary, fact) for fact in alike},
        scheme="" if largest is None else largest.stored_as,
        hub_id=name if "/" in name and not Path(name).exists() else None,
        license=_license(path),
    )


def compression(pair: Pair) -> CompressionResult | None:
    """How the checkpoint was made; None when it does not say, or another version wrote it."""
    try:
        return CompressionResult.from_dict(pair.made)
    except ReportError:
        return None


def environment(pair: Pair, text: str, **said: Any) -> Environment:
    """Where and with what the numbers are made.

    Args:
        pair: whose files are hashed.
        text: that fidelity was measured on.
        said: the other fields, which are known where the models ran.
    """
    # Sorted: the hash must not depend on the order in which shards are listed.
    files = "".join(f"{name} {pair.hashes[name]}\n" for name in sorted(pair.hashes))
    hashed = {"checkpoint": files, "text": text}
    hashes = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in hashed.items()}
    if isinstance(pair.manifest.get("identity_sha256"), str):
        hashes["made from"] = pair.manifest["identity_sha256"]
    return Environment(
        versions=_versions(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=processor_name() or platform.processor(),
        num_threads=torch.get_num_threads(),
        hashes=hashes,
        **said,
    )


def _versions() -> dict[str, str]:
    installed = {name: installed_version(name, "") for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: number for name, number in installed.items() if number}}


def _license(path: Path) -> str | None:
    """What the model's own card says, if it says anything that can be read."""
    with contextlib.suppress(ModelError, OSError):
        name = card_entries(path).get("license")
        return name if isinstance(name, str) and name else None
    return None
