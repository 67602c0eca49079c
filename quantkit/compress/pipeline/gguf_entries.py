"""Entries `quantkit.*` of a GGUF file: what anybody needs to make the file again, and what a search measured."""

from pathlib import Path
from typing import Any

import yaml

from quantkit.checkpoints.reader import file_digest
from quantkit.compress.recipe import Recipe
from quantkit.demo import bundled_calibration
from quantkit.distribution import own_version
from quantkit.errors import CheckpointError
from quantkit.output.staging import MANIFEST
from quantkit.safety.untrusted import read_object


def made_by(recipe: Recipe, model: Path, codes: Path) -> dict[str, str | int | float]:
    """Return the `quantkit.*` entries of a GGUF file that a recipe makes.

    Args:
        recipe: the recipe; its entry gives the names of files without their folders.
        model: folder of the original model.
        codes: finished folder of the run, whose manifest has the digest of the calibration tokens.
    Returns:
        `quantkit.version` and `quantkit.recipe` (YAML that `quantkit quantize` reads). With calibration data, also
        `quantkit.calibration.sha256` (of the text file) and `quantkit.calibration.tokens_sha256`. If a search
        wrote the recipe, also `quantkit.measured.*`; see `recipe.schema.Measured`. `convert` adds the adapters.
    """
    entries: dict[str, str | int | float] = {
        "quantkit.version": own_version("unknown"),
        "quantkit.recipe": _text(recipe),
    }
    identity = read_object(codes / MANIFEST, CheckpointError)["identity"]
    if recipe.calibration is not None:
        data = recipe.calibration.data
        file = bundled_calibration(model) if data == "bundled" else Path(data)
        if file.is_file():
            entries["quantkit.calibration.sha256"] = file_digest(file)
        entries["quantkit.calibration.tokens_sha256"] = str(identity["calibration"])
    return entries | measured_entries(recipe)


def measured_entries(recipe: Recipe) -> dict[str, str | int | float]:
    """Return the entries of `made_by` about what a search measured; none if no search wrote the recipe."""
    return {f"quantkit.measured.{key}": value for key, value in (recipe.measured or {}).items()}


def _text(recipe: Recipe) -> str:
    """Return a recipe as YAML. File names are written without their folders, which are private."""
    source: dict[str, Any] = dict(recipe.source)
    if recipe.calibration is not None and Path(recipe.calibration.data).is_file():
        source["calibration"] = {**source["calibration"], "data": Path(recipe.calibration.data).name}
    if recipe.imatrix is not None:
        source["imatrix"] = Path(recipe.imatrix).name
    text: str = yaml.safe_dump(source, sort_keys=False, width=10**6, allow_unicode=True)
    return text
