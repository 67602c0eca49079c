"""Which tensors a model of this config has, whether a checkpoint has exactly those, and whether they fit; none is read.

Shapes of quantized linears follow from their scheme and are checked when they are decoded; here their number of rows
and columns is, as far as headers and `weight_shape` tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ResourceError
from quantkit.models.description import ModelDescription
from quantkit.models.family import Family
from quantkit.models.layer_tensors import outer_tensors
from quantkit.models.linear_sets import EXPERT
from quantkit.numerics.scheme import Scheme
from quantkit.quantities import byte_size
from quantkit.runtime.devices import free_bytes

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Buffers that old checkpoints carry, and scales of a KV cache, which belong to no weight.
_IGNORED = re.compile(
    r".*(rotary_emb\.inv_freq|\.attention\.(masked_)?bias|\.(kv|[qkv])_scale|\.[qkv]_proj\.output_scale|\.(q|k|v|prob)_zero_point)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint must hold.

    Args:
        linears: (N, K) by full module name; a bias (N,) is optional.
        tensors: shape by full name, of everything that is never quantized.
        optional: as `tensors`, of what may be missing.
    """

    linears: dict[str, tuple[int, int]]
    tensors: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]


def manifest_of(model: ModelDescription, reader: CheckpointReader) -> Manifest:
    """The tensors of a model.

    Args:
        model: what its config.json says.
        reader: its checkpoint; asked only for names, where a family stores something in one of two ways.
    """
    family = model.family
    manifest = Manifest(
        linears={}, tensors={f"{family.embedding}.weight": (model.vocab_size, model.hidden_size)}, optional={}
    )
    for index in range(model.num_layers):
        prefix, layer = f"{family.layers}.{index}.", model.tensors(index)
        stacked = is_stacked(model, prefix, reader)
        for matrix in layer.matrices:
            if not (stacked and EXPERT in matrix.name):
                size = (matrix.out_features, matrix.in_features)
                manifest.linears.update({prefix + name: size for name in matrix.names})
        if stacked and model.experts is not None and family.experts is not None:
            count, width, hidden = model.experts.num_experts, model.experts.width, model.hidden_size
            manifest.tensors[prefix + family.experts.stacked_up] = (count, 2 * width, hidden)
            manifest.tensors[prefix + family.experts.stacked_down] = (count, hidden, width)
        _add_vectors(manifest, layer.vectors, prefix)
    _add_vectors(manifest, outer_tensors(model), "")
    if not model.tied:
        manifest.linears[head_name(family, reader)] = (model.vocab_size, model.hidden_size)
    return manifest


def head_name(family: Family, reader: CheckpointReader) -> str:
    """The output head's name in this checkpoint."""
    stored = family.stored_head
    return stored if stored is not None and f"{stored}.weight" in reader else family.head


def is_stacked(model: ModelDescription, prefix: str, reader: CheckpointReader) -> bool:
    """Whether the experts of a layer are stored as one tensor."""
    data = model.family.experts
    return data is not None and f"{prefix}{data.stacked_up}" in reader


def _add_vectors(manifest: Manifest, vectors: Mapping[str, tuple[int, ...]], prefix: str) -> None:
    """Biases of norms may be missing, which is a bias of zero."""
    for name, shape in vectors.items():
        known = manifest.optional if name.endswith(".bias") else manifest.tensors
        known[prefix + name] = shape


def check_tensors(model: ModelDescription, reader: CheckpointReader, scheme: Scheme | None) -> None:
    """A checkpoint has what the model's manifest says, in the right shapes, and nothing else.

    An output head may be stored although the embedding takes its place.

    Args:
        model: what its config.json says.
        reader: of the checkpoint; only headers are read, and shapes that are stored as tensors.
        scheme: of its quantized linears; None = it has none.
    Raises:
        CheckpointError: names the tensor, what was found and what was expected.
    """
    manifest = manifest_of(model, reader)
    known = {*manifest.tensors, *manifest.optional}
    if model.tied:
        known.add(f"{head_name(model.family, reader)}.weight")
    for name, shape in manifest.tensors.items():
        _check(reader, name, shape, required=True)
    for name, shape in manifest.optional.items():
        _check(reader, name, shape, required=False)
    by_module = local_names(reader)
    for name, (rows, width) in manifest.linears.items():
        local = by_module.get(name, set())
        known |= {f"{name}.{tensor}" for tensor in local}
        _check(reader, f"{name}.bias", (rows,), required=False)
        if is_quantized(name, local, scheme):
            _check_quantized(reader, name, (rows, width))
        else:
            if extra := sorted(local - {"weight", "bias"}):
                raise CheckpointError(
                    f"{reader.path}: tensor {name}.{extra[0]} belongs to a quantized weight, but config.json does "
                    "not say how it is quantized; copy the original config.json again"
                )
            _check(reader, f"{name}.weight", (rows, width), required=True)
    for name in reader.names:
        if name not in known and not _IGNORED.fullmatch(name):
            raise CheckpointError(
                f"{reader.path}: tensor {name} {reader.info(name).shape} has no place in the model that config.json "
                "describes; config.json and weights are not of one model"
            )


def is_quantized(name: str, local: Iterable[str], scheme: Scheme | None) -> bool:
    """Whether a linear with these tensors is stored as codes."""
    return scheme is not None and scheme.find(name) is not None and bool(set(local) - {"weight", "bias"})


def local_names(reader: CheckpointReader) -> dict[str, set[str]]:
    """Names of each module's own tensors, relative to it, by full module name; buffers of no use are left out."""
    modules: dict[str, set[str]] = {}
    for name in reader.names:
        module, _, local = name.rpartition(".")
        if not _IGNORED.fullmatch(name):
            modules.setdefault(module, set()).add(local)
    return modules


def _check(reader: CheckpointReader, name: str, shape: tuple[int, ...], *, required: bool) -> None:
    if name not in reader:
        if required:
            raise CheckpointError(
                f"{reader.path}: tensor {name} {shape} is missing; the download may be incomplete, or config.json "
                "is of another model"
            )
        return
    stored = tuple(reader.info(name).shape)
    if stored != shape:
        raise CheckpointError(f"{reader.path}: tensor {name} has shape {stored}, config.json says {shape}")


def _check_quantized(reader: CheckpointReader, name: str, shape: tuple[int, int]) -> None:
    """As far as can be told without unpacking."""
    if f"{name}.weight_shape" in reader:
        stored = tuple(reader.tensor(f"{name}.weight_shape").tolist())
    elif f"{name}.weight" in reader:
        stored = tuple(reader.info(f"{name}.weight").shape)
    else:
        return
    if stored != shape:
        raise CheckpointError(
            f"{reader.path}: the quantized weight {name} has shape {stored}, config.json says {shape}"
        )


def check_memory(reader: CheckpointReader, dtype: torch.dtype, device: torch.device) -> None:
    """The weights fit, with their largest tensor twice, before any of them is read.

    Args:
        reader: of the checkpoint.
        dtype: floats are converted to.
        device: where they go.
    Raises:
        ResourceError: gives both figures.
    """
    sizes = []
    for name in reader.names:
        info = reader.info(name)
        converted = info.dtype in _FLOATS
        sizes.append(math.prod(info.shape) * dtype.itemsize if converted else info.num_bytes)
    needed, available = sum(sizes) + max(sizes, default=0), free_bytes(device)
    if needed > available:
        raise ResourceError(
            f"{reader.path}: loading needs {byte_size(needed)} on {device}, {byte_size(available)} are available; "
            "use a smaller or more strongly quantized model, or free memory"
        )
