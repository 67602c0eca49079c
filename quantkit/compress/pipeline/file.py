"""Compression to one file: a run to a directory, and its conversion. Not the formats; see `conversion`.

The directory (`<file>.codes`, in the work folder) is what an interrupted run resumes from; it is deleted when the file
has been checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from quantkit.checkpoints.replaceable import check_apart, check_gguf
from quantkit.checkpoints.source import resolve
from quantkit.checkpoints.staging import open_stage
from quantkit.compress.convert import convert
from quantkit.compress.convert.gguf import check_model
from quantkit.compress.convert.source import open_source
from quantkit.compress.recipe import Recipe
from quantkit.demo import DEMO_MODEL
from quantkit.formats import REGISTRY as FORMATS
from quantkit.results import CompressionResult


def write_file(
    model: str | None,
    recipe: Recipe,
    output: str | Path | None,
    *,
    overwrite: bool,
    to_directory: Callable[[Path], CompressionResult],
) -> CompressionResult:
    """Compress a model to one file.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipe: what to do; its format is one file.
        output: the file; None = `<model>-<recipe>` with the format's suffix in the current directory.
        overwrite: replace an existing file.
        to_directory: compresses the model to this one.
    Raises:
        QuantkitError: as `quantkit.compress.pipeline.quantize`; whatever can be refused is, before any work.
    """
    folder = DEMO_MODEL if model is None else resolve(model)
    name = "demo" if model is None else Path(model).name
    file = Path(output) if output else Path(f"{name}-{recipe.name}{FORMATS.load(recipe.format).suffix}")
    check_apart(file, folder)
    kind = f"quantize --format {recipe.format}"
    with open_stage(file, kind, overwrite=overwrite, check=check_gguf, resumable=True) as stage:
        check_model(open_source(folder))
        codes, whole = stage.work.path / f"{file.name}.codes", stage.work.path / file.name
        result = to_directory(codes)
        written = convert(codes, recipe.format, whole, overwrite=True)
        stage.promote(whole)
    return dataclasses.replace(result, output=str(file), output_bytes=written.output_bytes)
