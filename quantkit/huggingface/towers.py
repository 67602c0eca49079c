"""Linears that stand beside a language model: vision and audio towers, and what projects their outputs."""

import inspect
import re
from dataclasses import replace
from typing import Any

from torch import nn

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError
from quantkit.huggingface.layer_inputs import build_model
from quantkit.huggingface.names import Renaming, find_stored_names
from quantkit.models.family import Family

# A module's code that reads the weight of one inside it, e.g. `self.blocks[0].mlp.fc2.weight`.
_READ = re.compile(r"\bself((?:\.\w+|\[\d+\])+)\.weight\b")


def tower_linears(model: Any, family: Family) -> dict[str, tuple[int, int]]:
    """(N, K) of the linears outside the language model by full name; none of a model that is nothing else.

    Without those whose weight other code reads, for its dtype say, which codes are not.

    Args:
        model: of transformers, weightless.
        family: where its language model is.
    """
    if model.config.get_text_config() is model.config or not family.backbone:
        return {}
    inside = tuple(f"{name}." for name in (family.backbone, family.layers, family.embedding, family.head))
    paths = {kind: _paths_read(kind) for kind in {type(module) for module in model.modules()}}
    read = {f"{name}{path}".lstrip(".") for name, module in model.named_modules() for path in paths[type(module)]}
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        # Not a subclass: that of `MultiheadAttention` is never called, its weight is used.
        if type(module) is nn.Linear and not f"{name}.".startswith(inside) and name not in read
    }


def _paths_read(kind: type) -> tuple[str, ...]:
    """Modules whose weight a class reads itself, relative to it, with a dot in front."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made at run time
        return ()
    return tuple(re.sub(r"\[(\d+)\]", r".\1", path) for path in _READ.findall(source))


def with_tower_names(family: Family, reader: CheckpointReader) -> Family:
    """A family that knows what files call every tensor of the model, those outside its language model included.

    Args:
        family: of a model that no file describes.
        reader: of the files, by their own names.
    Raises:
        ModelError: transformers does not say how it renames tensors.
    """
    if family.stored_names is not None:
        return family
    renaming = Renaming.of(build_model(reader))
    if renaming is None:
        raise ModelError("quantizing what stands beside the language model needs transformers 5 or later")
    names = find_stored_names(renaming, reader, f"{family.backbone}.")
    return replace(family, stored_names=names, stored_prefix=None, stored_head=None)
