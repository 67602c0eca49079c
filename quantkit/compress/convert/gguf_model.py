"""A checkpoint as a list of GGUF tensors and entries: what becomes what, decided from headers and config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.compress.convert.gguf_vocab import read_vocab
from quantkit.compress.convert.source import Source
from quantkit.errors import ModelError
from quantkit.models.description import ModelDescription, describe
from quantkit.models.families import supported
from quantkit.models.family import Family, GGUFNames
from quantkit.models.layer_tensors import norm_names
from quantkit.models.rope import RopeConfig, read_rope
from quantkit.untrusted import shorten

_LEFT_OUT = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTensor:
    """One tensor of the file.

    Args:
        name: in the file.
        module: full module name in the checkpoint.
        local: "weight" or "bias".
        shape: as it is written, outermost first.
        is_quantized: the weight of a linear whose codes are carried over.
        is_norm: a norm's weight, to which the family's offset is added.
        is_layer: part of a decoder layer.
        interleave: heads whose rows are reordered, 0 = as they are.
        transposed: stored the other way round in the checkpoint.
    """

    name: str
    module: str
    local: str
    shape: tuple[int, ...]
    is_quantized: bool
    is_norm: bool
    is_layer: bool
    interleave: int
    transposed: bool

    @property
    def stored_name(self) -> str:
        """In the checkpoint."""
        return f"{self.module}.{self.local}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFModel:
    """A model whose family has GGUF names.

    Args:
        model: what its config.json says.
        names: how llama.cpp calls the family.
        layer, outer: name of each module of a layer by its relative name, and of those outside.
        heads: of modules whose rows are reordered, by relative name.
    """

    model: ModelDescription
    names: GGUFNames
    layer: Mapping[str, str]
    outer: Mapping[str, str]
    heads: Mapping[str, int]


def find_gguf_model(source: Source) -> GGUFModel:
    """The model of a checkpoint, as llama.cpp calls its parts.

    Raises:
        ModelError: GGUF names of it are not known here, or it needs what a GGUF file made here cannot say.
    """
    config, where = source.reader.config, str(source.reader.path)
    classes = config.get("architectures") or []
    known = {name: family for name, family in supported().items() if family.gguf is not None}
    family = next((known[name] for name in classes if name in known), None)
    if family is None or family.gguf is None:
        raise ModelError(f"{where}: no GGUF names are known for {classes}; known: {', '.join(known)}")
    model = describe(config, family, f"{where}/config.json")
    root = family.multipliers.attention_root
    if root is not None and model.entries.number(root, default=model.head_dim) != model.head_dim:
        raise ModelError(
            f"{where}: {root} is {model.entries.get(root)} and heads are {model.head_dim} wide; "
            "llama.cpp scales attention by the width"
        )
    # All that families with GGUF names have outside of layers beside these are learned positions.
    outer = {name.removesuffix(".weight"): "position_embd" for name in family.outside}
    outer |= {family.embedding: "token_embd", family.final_norm: "output_norm", family.head: "output"}
    heads = zip(family.parts.qkv[:2], (model.num_heads, model.num_kv_heads), strict=False)
    return GGUFModel(
        model=model,
        names=family.gguf,
        layer=_layer_names(model),
        outer=outer,
        heads=dict(heads) if family.gguf.interleaved else {},
    )


def _layer_names(model: ModelDescription) -> dict[str, str]:
    parts, norms, qk_norm = model.family.parts, norm_names(model), model.family.qk_norm
    before, after, before_mlp, after_mlp = norms
    qkv = ("attn_qkv",) if len(parts.qkv) == 1 else ("attn_q", "attn_k", "attn_v")
    up = ("ffn_up",) if len(parts.up) == 1 else ("ffn_gate", "ffn_up")
    pairs: list[tuple[str | None, str]] = [
        (before, "attn_norm"),
        *zip(parts.qkv, qkv, strict=True),
        (parts.output, "attn_output"),
        (after, "post_attention_norm"),
        (before_mlp, "ffn_norm"),
        *zip(parts.up, up, strict=True),
        (parts.down, "ffn_down"),
        (after_mlp, "post_ffw_norm"),
    ]
    if qk_norm is not None and model.qk_norm:
        pairs += [(qk_norm.query, "attn_q_norm"), (qk_norm.key, "attn_k_norm")]
    return {module: name for module, name in pairs if module is not None}


def metadata_of(source: Source, gguf: GGUFModel, file_type: int) -> dict[str, Any]:
    """All entries of the file.

    Args:
        source: the checkpoint.
        gguf: its model.
        file_type: ggml's number for what most tensors are.
    Raises:
        ModelError: config.json lacks a number, or the tokenizer or the positions cannot be said in GGUF.
    """
    where, model, name = source.reader.path, gguf.model, gguf.names.name
    entries: dict[str, Any] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": where.resolve().name,
        "general.file_type": file_type,
        "general.quantization_version": 2,
    }
    known = {"num_key_value_heads": model.num_kv_heads, "intermediate_size": model.width}
    for key, config_key in gguf.names.numbers.items():
        value = known.get(config_key, model.entries.get(config_key))
        if value is None and key == "context_length":
            raise ModelError(f"{where}/config.json has no {config_key!r}, which a GGUF file needs")
        if value is not None:
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ModelError(f"{where}/config.json: {config_key!r} is {shorten(value)}, expected a finite number")
            entries[f"{name}.{key}"] = float(value) if "epsilon" in key or "softcapping" in key else int(value)
    if gguf.names.rotary:
        entries |= {f"{name}.{key}": value for key, value in _rotary(model).items()}
    embedding = next(
        (name for name in source.modules if _full_name(model.family, name) == model.family.embedding), None
    )
    if embedding is None:
        raise ModelError(f"{where} has no {model.family.embedding}.weight; the download may be incomplete")
    rows = source.reader.info(f"{embedding}.weight").shape[0]
    return {**entries, **read_vocab(where, source.reader.config, rows)}


def list_tensors(source: Source, gguf: GGUFModel) -> list[ExportedTensor]:
    """Every tensor of the file in its order.

    Raises:
        ModelError: the checkpoint has a module that the family does not name.
    """
    family, tensors = gguf.model.family, []
    norms = {family.final_norm, *norm_names(gguf.model)}
    norms |= {family.qk_norm.query, family.qk_norm.key} if family.qk_norm is not None else set()
    tied = bool(source.reader.config.get("tie_word_embeddings"))
    for module, locals_ in source.modules.items():
        full = _full_name(family, module)
        if any(f"{full}.{local}".endswith(_LEFT_OUT) for local in locals_) or (tied and full == family.head):
            continue
        name, relative = _gguf_name(gguf, full)
        if name is None:
            raise ModelError(f"{source.reader.path}: {module} has no place in a GGUF file of {gguf.names.name}")
        own = source.shape(module) if module in source.linears else None  # codes are not stored under `weight`
        for local in ("weight", "bias"):
            is_weight = local == "weight"
            if not (local in locals_ or (is_weight and own)):
                continue
            shape = own if is_weight and own else source.reader.info(f"{module}.{local}").shape
            transposed = relative in family.transposed and len(shape) == 2
            tensors.append(
                ExportedTensor(
                    name=f"{name}.{local}",
                    module=module,
                    local=local,
                    shape=tuple(reversed(shape)) if transposed else tuple(shape),
                    is_quantized=is_weight and module in source.linears,
                    is_norm=is_weight and relative in norms,
                    is_layer=relative != full,
                    interleave=gguf.heads.get(relative, 0),
                    transposed=transposed,
                )
            )
    return tensors


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of q or k with the two halves of each head interleaved, as llama.cpp rotates neighbours."""
    if not heads:
        return rows
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def long_range_factors(model: ModelDescription) -> Tensor | None:
    """Divisors of the rotary frequencies of Llama 3.1 and later; None for other models."""
    rope = _rope(model)
    if rope.kind != "llama3":
        return None
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    divisors = []
    for pair in range(0, model.head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (pair / model.head_dim)
        smooth = min(1.0, max(0.0, (rope.original_length / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


def _rotary(model: ModelDescription) -> dict[str, Any]:
    rope, width = _rope(model), model.head_dim
    entries: dict[str, Any] = {"rope.dimension_count": rope.width, "rope.freq_base": rope.theta}
    if model.entries.entries.get("head_dim"):
        entries |= {"attention.key_length": width, "attention.value_length": width}
    if rope.kind in ("linear", "yarn"):
        entries |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
        if rope.kind == "yarn":
            entries["rope.scaling.original_context_length"] = rope.original_length
    elif rope.kind not in ("default", "llama3"):
        raise ModelError(
            f"{model.entries.where} has rope scaling of type {rope.kind!r}, which is not written to GGUF here"
        )
    return entries


def _rope(model: ModelDescription) -> RopeConfig:
    """Of layers that see everything; llama.cpp knows the others."""
    length = model.entries.count("max_position_embeddings")
    return read_rope(model.entries, model.family.rope, model.head_dim, length, local=False)


def _gguf_name(gguf: GGUFModel, module: str) -> tuple[str | None, str]:
    """Name in the file without `.weight`, and the name relative to the layer (or the full one outside of layers)."""
    if module in gguf.outer:
        return gguf.outer[module], module
    prefix = f"{gguf.model.family.layers}."
    if not module.startswith(prefix):
        return None, module
    number, _, relative = module.removeprefix(prefix).partition(".")
    name = gguf.layer.get(relative)
    return (f"blk.{number}.{name}" if name and number.isdecimal() else None), relative


def _full_name(family: Family, module: str) -> str:
    """A module's name with the prefix of the backbone, which transformers leaves out in some files of GPT-2."""
    start = f"{family.backbone}."
    bare = family.backbone == "transformer" and not module.startswith((start, family.head))
    return start + module if bare else module
