"""Derive the tensors and metadata of a GGUF file from a checkpoint's headers and config.json."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.compress.convert.gguf_vocab import read_vocab
from quantkit.compress.convert.source import Source
from quantkit.errors import ModelError
from quantkit.models.description import ModelDescription, describe
from quantkit.models.families import supported
from quantkit.models.family import Family
from quantkit.models.gguf_names import (
    interleaved_heads,
    layer_names,
    llama3_divisors,
    norm_modules,
    outer_names,
)
from quantkit.models.rope import RopeConfig, read_rope
from quantkit.models.stored_names import GGUFNames
from quantkit.safety.untrusted import shorten

# Buffers in old files that every reader computes itself.
_LEFT_OUT = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTensor:
    """One tensor of the GGUF file.

    Args:
        name: name in the GGUF file.
        module: full module name in the checkpoint.
        stored_name: tensor name in the checkpoint.
        shape: shape in the GGUF file, outermost dimension first.
        is_quantized: whether the tensor is the weight of a linear whose codes are copied.
        is_norm: whether the tensor is a norm's weight, to which the family's offset is added.
        interleave: number of heads whose rows are reordered; 0 = rows keep their order.
        transposed: whether the checkpoint stores the tensor transposed.
    """

    name: str
    module: str
    stored_name: str
    shape: tuple[int, ...]
    is_quantized: bool
    is_norm: bool
    interleave: int
    transposed: bool


def find_gguf_model(source: Source) -> ModelDescription:
    """Return the description of a checkpoint's model, after checking that a GGUF file can describe the model.

    Raises:
        ModelError: quantkit knows no GGUF names for the model, or the model has a setting that GGUF cannot store.
    """
    config, where = source.reader.config, str(source.reader.path)
    classes = config.get("architectures") or []
    known = {name: family for name, family in supported().items() if family.gguf is not None and family.gguf.is_written}
    family = next((known[name] for name in classes if name in known), None)
    if family is None:
        raise ModelError(f"{where}: GGUF export of {classes} is not supported; supported: {', '.join(known)}")
    model = describe(config, family, f"{where}/config.json")
    root = family.multipliers.attention_root
    if root is not None and model.entries.number(root, default=model.head_dim) != model.head_dim:
        raise ModelError(
            f"{where}: {root} is {model.entries.get(root)}, but llama.cpp scales attention by the head width "
            f"{model.head_dim}; GGUF export of this model is not supported"
        )
    return model


def _names(family: Family) -> GGUFNames:
    assert family.gguf is not None, "find_gguf_model refuses families without GGUF names"
    return family.gguf


def metadata_of(source: Source, model: ModelDescription, file_type: int) -> dict[str, Any]:
    """Return all metadata entries of the GGUF file.

    Args:
        source: the checkpoint.
        model: result of `find_gguf_model`.
        file_type: number of ggml's type of the whole file.
    Raises:
        ModelError: config.json lacks a required number or has an invalid one, or GGUF does not support the tokenizer or
            the rope scaling.
    """
    where, names = source.reader.path, _names(model.family)
    name = names.name
    entries: dict[str, Any] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": where.resolve().name,
        "general.file_type": file_type,
        # The version of the block layouts, GGML_QNT_VERSION.
        "general.quantization_version": 2,
    }
    known = {"num_key_value_heads": model.num_kv_heads, "intermediate_size": model.width}
    for key, config_key in names.numbers.items():
        value = known.get(config_key, model.entries.get(config_key))
        if value is None and key == "context_length":
            raise ModelError(f"{where}/config.json has no {config_key!r}, which a GGUF file needs")
        if value is not None:
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ModelError(f"{where}/config.json: {config_key!r} is {shorten(value)}, expected a finite number")
            # The Python type decides the type in the file, and llama.cpp accepts only one type.
            entries[f"{name}.{key}"] = float(value) if "epsilon" in key or "softcapping" in key else int(value)
    if names.rotary:
        entries |= {f"{name}.{key}": value for key, value in _rotary(model).items()}
    embedding = next(
        (name for name in source.modules if _full_name(model.family, name) == model.family.embedding), None
    )
    if embedding is None:
        raise ModelError(f"{where} has no {model.family.embedding}.weight; the download may be incomplete")
    rows = source.reader.info(f"{embedding}.weight").shape[0]
    return {**entries, **read_vocab(where, source.reader.config, rows)}


def list_tensors(source: Source, model: ModelDescription) -> list[ExportedTensor]:
    """Return all tensors of the GGUF file, in file order.

    Raises:
        ModelError: a module has no GGUF name, or config.json does not fit the shape of a tensor.
    """
    family, tensors = model.family, []
    outer, of_layer = outer_names(family), layer_names(model)
    heads, norms = interleaved_heads(model), norm_modules(model)
    tied = bool(source.reader.config.get("tie_word_embeddings"))
    for module, locals_ in source.modules.items():
        full = _full_name(family, module)
        if any(f"{full}.{local}".endswith(_LEFT_OUT) for local in locals_) or (tied and full == family.head):
            continue
        number, relative = _in_layer(family, full)
        name = outer.get(full) if number is None else of_layer.get(relative)
        if name is None:
            raise ModelError(
                f"{source.reader.path}: quantkit knows no GGUF name for module {module}, so it cannot write this model "
                f"as a GGUF file of architecture {_names(family).name}"
            )
        is_quantized = module in source.linears
        own = {"weight": source.shape(module)} if is_quantized else {}  # codes are not stored under `weight`
        for local in ("weight", "bias"):
            if not (local in locals_ or own.get(local)):
                continue
            shape = own.get(local) or source.reader.info(f"{module}.{local}").shape
            transposed = relative in family.transposed and len(shape) == 2
            if relative in heads and shape[0] != heads[relative] * model.head_dim:
                raise ModelError(
                    f"{source.reader.path}: {module}.{local} has {shape[0]} rows, but config.json says "
                    f"{heads[relative]} heads of width {model.head_dim}; correct config.json"
                )
            tensors.append(
                ExportedTensor(
                    name=f"{name}.{local}" if number is None else f"blk.{number}.{name}.{local}",
                    module=module,
                    stored_name=f"{module}.{local}",
                    shape=tuple(reversed(shape)) if transposed else tuple(shape),
                    is_quantized=is_quantized and local == "weight",
                    is_norm=local == "weight" and relative in norms,
                    interleave=heads.get(relative, 0),
                    transposed=transposed,
                )
            )
    return tensors


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Interleave the two halves of each head of q or k, rows (N, ...), because llama.cpp rotates neighbouring rows."""
    if not heads:
        return rows
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def long_range_factors(model: ModelDescription) -> Tensor | None:
    """Return the divisors of the rotary frequencies for Llama 3.1 and later; None for other models."""
    rope = _rope(model)
    return torch.tensor(llama3_divisors(rope), dtype=torch.float32) if rope.kind == "llama3" else None


def _rotary(model: ModelDescription) -> dict[str, Any]:
    rope, width = _rope(model), model.head_dim
    entries: dict[str, Any] = {"rope.dimension_count": rope.width, "rope.freq_base": rope.theta}
    # Without these, llama.cpp uses hidden width / number of heads.
    if model.entries.entries.get("head_dim"):
        entries |= {"attention.key_length": width, "attention.value_length": width}
    if rope.kind in ("linear", "yarn"):
        entries |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
        if rope.kind == "yarn":
            entries["rope.scaling.original_context_length"] = rope.original_length
    elif rope.kind not in ("default", "llama3"):
        raise ModelError(
            f"{model.entries.where}: rope_type {rope.kind!r} is not supported in GGUF; "
            "supported: default, linear, llama3, yarn"
        )
    return entries


def _rope(model: ModelDescription) -> RopeConfig:
    """Return the rotary settings of full-attention layers; llama.cpp itself derives those of sliding-window layers."""
    length = model.entries.count("max_position_embeddings")
    return read_rope(model.entries, model.family.rope, model.head_dim, length, local=False)


def _in_layer(family: Family, module: str) -> tuple[str | None, str]:
    """Return a module's layer number and its name in the layer; outside the layers, return None and its full name."""
    prefix = f"{family.layers}."
    number, _, relative = module.removeprefix(prefix).partition(".")
    return (number, relative) if module.startswith(prefix) and number.isdecimal() else (None, module)


def _full_name(family: Family, module: str) -> str:
    """Return a module's name with the backbone's prefix, which some GPT-2 checkpoints omit."""
    start = f"{family.backbone}."
    bare = family.backbone == "transformer" and not module.startswith((start, family.head))
    return start + module if bare else module
