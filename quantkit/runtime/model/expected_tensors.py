"""Tensors that a model must have, and checks whether a checkpoint has them and fits in memory; reads only headers.

How a quantized linear is stored depends on its scheme, so `Format.decode` checks the shapes of its tensors. This module
checks only the shape that the dequantized weight will have, if headers or `weight_shape` state it.
"""

import math
import re
from collections.abc import Collection, Iterable

import torch

from quantkit.checkpoints.kv_cache_entries import CACHE_TENSORS
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ResourceError
from quantkit.formats.base import by_module
from quantkit.machine.devices import free_bytes
from quantkit.models.description import ModelDescription
from quantkit.models.layer_tensors import model_tensors
from quantkit.models.mtp import MTPHead, head_tensors, mtp_prefixes
from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.quantities import byte_size

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Tensors that belong to no weight: buffers that old checkpoints carry, constants that are read elsewhere, and scales of
# a KV cache.
_IGNORED = re.compile(
    rf".*(\.act_fn\.(beta|eps)|rotary_emb\.inv_freq|\.(attention|attn)\.(masked_)?bias|\.attn\.causal_mask|{CACHE_TENSORS})"
)


Shapes = dict[str, tuple[int, ...]]


def manifest_of(model: ModelDescription, head: MTPHead | None = None) -> tuple[dict[str, tuple[int, int]], Shapes]:
    """Return the shapes of the tensors that a checkpoint of a model must hold, in the form of `model_tensors`.

    Args:
        model: description of the model.
        head: MTP head whose tensors are included; None = no MTP head.
    """
    linears, others = model_tensors(model)
    if head is not None:
        own = head_tensors(model, head)
        linears |= {name: (one.out_features, one.in_features) for one in own.matrices for name in one.names}
        others |= own.vectors
    return linears, others


def check_tensors(
    model: ModelDescription, reader: CheckpointReader, scheme: Scheme | None, head: MTPHead | None = None
) -> None:
    """Check that a checkpoint has exactly the model's tensors, in the right shapes.

    A stored output head is accepted even if the model uses the embedding instead.

    Args:
        model: description from config.json.
        reader: reader of the checkpoint; only headers, and shapes that are stored as tensors, are read.
        scheme: scheme of the quantized linears; None = the checkpoint has none.
        head: MTP head whose tensors the checkpoint must have too; None = tensors of MTP heads are not checked.
    Raises:
        CheckpointError: a tensor does not match; the message names it, what was found and what was expected.
    """
    linears, others = manifest_of(model, head)
    known = {*others, *([f"{model.family.head}.weight"] if model.tied else [])}
    for name, shape in others.items():
        # Biases of norms may be missing; they are then zero.
        reader.check_shape(name, shape, required=not name.endswith(".bias"))
    by_module = local_names(reader, others)
    for name, (rows, width) in linears.items():
        local = by_module.get(name, set())
        known |= {f"{name}.{tensor}" for tensor in local}
        reader.check_shape(f"{name}.bias", (rows,), required=False)
        if stored_scheme(name, local, scheme) is not None:
            _check_quantized(reader, name, (rows, width))
        else:
            if extra := sorted(local - {"weight", "bias"}):
                raise CheckpointError(
                    f"{reader.path}: tensor {name}.{extra[0]} belongs to a quantized weight, but config.json does "
                    "not say how it is quantized; copy the original config.json again"
                )
            reader.check_shape(f"{name}.weight", (rows, width))
    unread = (*model.family.unread, *mtp_prefixes(model))
    for name in reader.names:
        # A tensor that no part of the model uses would silently make the output wrong.
        if name not in known and not _IGNORED.fullmatch(name) and not name.startswith(unread):
            raise CheckpointError(
                f"{reader.path}: the model that config.json describes has no tensor {name}, but the weights have one "
                f"of shape {reader.info(name).shape}; config.json and weights belong to different models"
            )


def stored_scheme(name: str, local: Iterable[str], scheme: Scheme | None) -> LinearScheme | None:
    """Return the scheme of a linear; None if the linear is stored unquantized.

    Args:
        name: full module name of the linear.
        local: names of the linear's stored tensors, relative to the module.
        scheme: scheme of the checkpoint's quantized linears; None = there are none.
    """
    # A scheme may match more linears than are quantized; the stored tensors decide.
    return scheme.find(name) if scheme is not None and set(local) - {"weight", "bias"} else None


def local_names(reader: CheckpointReader, others: Collection[str] = ()) -> dict[str, set[str]]:
    """Return the names of each module's tensors, without unused buffers.

    Keys are module names; the names of tensors are relative to their module.

    Args:
        reader: reader of the checkpoint.
        others: full names of tensors to leave out, which are stored in a linear's module but are no part of the linear,
            such as a router's balance.
    """
    modules = by_module(name for name in reader.names if name not in others and not _IGNORED.fullmatch(name))
    return {module: set(names) for module, names in modules.items()}


def _check_quantized(reader: CheckpointReader, name: str, shape: tuple[int, int]) -> None:
    """Check the shape of a quantized weight as far as possible without unpacking."""
    stored: tuple[int, ...] = shape
    if f"{name}.weight_shape" in reader:
        stored = tuple(reader.tensor(f"{name}.weight_shape").tolist())
    elif f"{name}.weight" in reader:
        stored = reader.info(f"{name}.weight").shape
    if stored != shape:
        raise CheckpointError(
            f"{reader.path}: the quantized weight {name} has shape {stored}, but config.json says {shape}; config.json "
            "and weights belong to different models"
        )


def check_memory(reader: CheckpointReader, dtype: torch.dtype, device: torch.device) -> None:
    """Check that all weights fit in memory before any weight is read; the largest tensor counts twice.

    Args:
        reader: reader of the checkpoint.
        dtype: dtype that floats are converted to.
        device: target device.
    Raises:
        ResourceError: the weights do not fit; the message gives the bytes needed and the bytes available.
    """
    sizes = []
    for name in reader.names:
        info = reader.info(name)
        converted = info.dtype in _FLOATS
        sizes.append(math.prod(info.shape) * dtype.itemsize if converted else info.num_bytes)
    # The largest counts twice: until the tensor that was read is freed, memory holds its converted copy too.
    needed, available = sum(sizes) + max(sizes, default=0), free_bytes(device)
    if needed > available:
        raise ResourceError(
            f"{reader.path}: loading needs {byte_size(needed)} on {device}, but {byte_size(available)} are available; "
            "use a smaller or more heavily quantized model, or free memory"
        )
