"""Which model is compressed, one that a file describes or one that is discovered; and what its files call its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.skeleton import Skeleton
from quantkit.compress.discovery.discover import Discovery, discover
from quantkit.models.families import find_compressible, supported
from quantkit.models.family import Family
from quantkit.numerics.scheme import LinearScheme


def find_model(reader: CheckpointReader) -> tuple[Family, Discovery | None]:
    """What a checkpoint's model is made of.

    Args:
        reader: of the checkpoint.
    Returns:
        the description of its family, or what was found where there is none.
    Raises:
        ModelError: config.json names no class, or the model cannot be compressed; one line says why.
    """
    names = reader.config.get("architectures")
    if isinstance(names, list) and names and not set(map(str, names)) & supported().keys():
        discovery = discover(reader)
        return discovery.family, discovery
    return find_compressible(reader.config), None


def with_stored_names(
    reader: ModelReader, skeleton: Skeleton, linears: Mapping[str, LinearScheme], ignored: Sequence[str]
) -> tuple[dict[str, LinearScheme], tuple[str, ...]]:
    """What config.json says of which module, for loaders that go by module names and those that go by tensor names.

    transformers and what copies its modules look for the names of modules; files keep the names that wrappers had when
    they were published. Where both are the same, nothing is added.

    Args:
        reader: of the source.
        skeleton: the model.
        linears: scheme of each quantized linear, by module name.
        ignored: module names of the other linears.
    Returns:
        both with the names of the files added.
    """
    schemes = dict(linears) | {reader.stored_name(f"{name}.")[:-1]: scheme for name, scheme in linears.items()}
    others = [*ignored, *(reader.stored_name(f"{name}.")[:-1] for name in ignored)]
    for name in reader.names:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(reader.info(name).shape) == 2 and not skeleton.has_parameter(name):
            others.append(module)  # of a part that is called otherwise in the model, e.g. a vision tower
    return schemes, tuple(dict.fromkeys(name for name in others if name not in schemes))
