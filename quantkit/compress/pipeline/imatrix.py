"""Importance matrices as in llama.cpp: collect the matrix of a model, and read a matrix for the linears to round.

Shapes: K inputs of a linear, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.observers import Magnitude
from quantkit.compress.pipeline.inputs import embed, read_samples
from quantkit.compress.pipeline.layers import layer_context
from quantkit.compress.pipeline.plan import Plan, build_plan
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.description import describe
from quantkit.models.gguf_names import layer_names
from quantkit.output.staging import check_gguf, open_stage
from quantkit.output.writer import writing

if TYPE_CHECKING:
    from quantkit.formats.ggml.imatrix import ImportanceMatrix


@torch.inference_mode()
def collect_imatrix(
    model: str | None,
    output: Path,
    *,
    data: str = "bundled",
    samples: int = 128,
    sequence_length: int = 512,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> ImportanceMatrix:
    """Run calibration text through a model layer by layer, and write a GGUF file with the mean square of each input of
    each linear.

    Args:
        model: directory or hub id; None = the bundled demo model.
        output: GGUF file to write.
        data, samples, sequence_length, seed: see `calibration` and `seed` of a recipe.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        overwrite: replace an existing file.
        progress: called before each layer with the number of finished layers, the number of layers, and the layer's
            name.
    Returns:
        The importance matrix that was written.
    Raises:
        InputError: model, data or output cannot be used.
    """
    from quantkit.formats.ggml.imatrix import ImportanceMatrix, write_imatrix  # imports the gguf package

    with open_stage(output, "imatrix", overwrite=overwrite, check=check_gguf) as stage, writing(stage.work.path):
        plan = build_plan(model, _recipe(data, samples, sequence_length, seed), stage.work.checkpoint, device)
        names = _gguf_names(plan)
        texts = read_samples(plan)
        assert texts is not None, "the recipe has calibration data"
        store = ActivationStore(stage.work.path / "activations", "disk", embed(plan, texts))
        means: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for index in range(plan.skeleton.num_layers):
            layer = layer_context(plan, index, [store])
            progress(index, plan.skeleton.num_layers, layer.name)
            sets = [group.linears for group in layer.sets]
            widths = {of[0]: layer.weight(of[0]).shape[1] for of in sets}
            seen = layer.observe({name: Magnitude(width, layer.device) for name, width in widths.items()})
            for name, first in ((name, of[0]) for of in sets for name in of):
                key = names[f"{layer.name}.{name}"]
                means[key] = seen[first].mean_square.cpu().view(1, -1)
                counts[key] = torch.tensor([float(seen[first].num_tokens)])
            if index + 1 < plan.skeleton.num_layers:
                store.advance(layer.advance)
                store.forget_previous()
        source = "quantkit's bundled text" if data == "bundled" else Path(data).name
        matrix = ImportanceMatrix(means=means, counts=counts, data=source, chunk=sequence_length)
        draft = stage.work.path / output.name
        write_imatrix(draft, matrix)
        stage.promote(draft)
    return matrix


def read_importance(plan: Plan) -> dict[str, Tensor]:
    """Return the mean squares (K,) of each linear's inputs, keyed by the linear's full name; see `Recipe.imatrix`.

    The result is empty if the recipe names no importance matrix.

    Raises:
        CheckpointError: the file lacks a linear, or gives it a different number of inputs.
    """
    if plan.recipe.imatrix is None:
        return {}
    from quantkit.formats.ggml.imatrix import read_imatrix  # imports the gguf package

    path = Path(plan.recipe.imatrix)
    matrix, names, importance = read_imatrix(path), _gguf_names(plan), {}
    for name in plan.linears:
        mean, width = matrix.means.get(names[name]), plan.reader.info(f"{name}.weight").shape[1]
        if mean is None:
            raise CheckpointError(
                f"{path} has no statistics for {names[name]}; make the importance matrix from this model, or "
                f"add {name} to the recipe's ignore"
            )
        if tuple(mean.shape) != (1, width):
            raise CheckpointError(
                f"{path}: the means of {names[name]} have shape {tuple(mean.shape)}, but this linear has {width} "
                "inputs; make the importance matrix from this model"
            )
        # Even the weights of an input that was always 0 need sensible codes, so no importance is 0.
        importance[name] = mean[0].clamp(min=float(mean.mean()) * 1e-6)
    return importance


def _recipe(data: str, samples: int, sequence_length: int, seed: int) -> Recipe:
    """Return a recipe with these calibration settings, with which nothing is quantized."""
    calibration = {"data": data, "samples": samples, "sequence_length": sequence_length}
    fields = {"name": "imatrix", "weights": {"dtype": "int8"}, "steps": ["rtn"], "seed": seed}
    return build({**fields, "calibration": calibration}, "imatrix")


def _gguf_names(plan: Plan) -> dict[str, str]:
    """Return the name in GGUF files of every linear in the layers, keyed by full name."""
    if plan.family.gguf is None or plan.discovery is not None:
        raise ModelError(
            f"{plan.model}: quantkit does not know the names of this model's tensors in GGUF files, so it can neither "
            "make nor use an importance matrix for the model"
        )
    own = layer_names(describe(plan.reader.config, plan.family, plan.model))
    names = {}
    for index in range(plan.skeleton.num_layers):
        for name in plan.skeleton.linear_shapes(index):
            if name not in own:
                raise ModelError(
                    f"{plan.model}: GGUF files store all experts of a layer in one tensor, not {name} alone; quantkit "
                    "supports no importance matrix for such models"
                )
            names[f"{plan.skeleton.layer_name(index)}.{name}"] = f"blk.{index}.{own[name]}.weight"
    return names
