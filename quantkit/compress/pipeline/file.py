"""Compression to one file: a run to a directory beside it, and its conversion. Not the formats; see `conversion`.

The directory (`<file>.codes`) is what an interrupted run resumes from; it is deleted when the file has been checked.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from quantkit.checkpoints.source import resolve
from quantkit.compress.convert import convert
from quantkit.compress.convert.gguf import check_model
from quantkit.compress.convert.run import check_place
from quantkit.compress.convert.source import open_source
from quantkit.compress.recipe import Recipe
from quantkit.demo import DEMO_MODEL
from quantkit.results import CompressionResult


def write_file(
    model: str | None,
    recipe: Recipe,
    output: str | Path | None,
    *,
    overwrite: bool,
    run: Callable[..., CompressionResult],
) -> CompressionResult:
    """Compress a model to a GGUF file.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipe: what to do; its format is gguf.
        output: the file; None = `<model>-<recipe>.gguf` in the current directory.
        overwrite: replace an existing file.
        run: compresses to a directory.
    Raises:
        QuantkitError: as `quantkit.compress.pipeline.quantize`; whatever can be refused is, before any work.
    """
    folder = DEMO_MODEL if model is None else resolve(model)
    name = "demo" if model is None else Path(model).name
    file = Path(output) if output else Path(f"{name}-{recipe.name}.gguf")
    check_place(file, folder, overwrite=overwrite)
    check_model(open_source(folder))
    codes = file.with_name(f"{file.name}.codes")
    result = run(model, recipe, codes, overwrite=True)
    written = convert(codes, "gguf", file, overwrite=overwrite)
    shutil.rmtree(codes)
    return dataclasses.replace(result, output=str(file), output_bytes=written.output_bytes)
