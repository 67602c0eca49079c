"""A checkpoint as a list of GGUF tensors and entries: what becomes what, decided from headers and config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.compress.convert.gguf_families import FAMILIES, Family
from quantkit.compress.convert.gguf_vocab import read_vocab
from quantkit.compress.convert.source import Source
from quantkit.errors import ModelError

_LEFT_OUT = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor of the file.

    Args:
        name: in the file.
        module: full module name in the checkpoint.
        local: "weight" or "bias".
        shape: as it is written, outermost first.
        is_norm: a norm's weight, to which the family's offset is added.
        is_layer: part of a decoder layer.
        interleave: heads whose rows are reordered, 0 = as they are.
        transposed: stored the other way round in the checkpoint.
    """

    name: str
    module: str
    local: str
    shape: tuple[int, ...]
    is_norm: bool
    is_layer: bool
    interleave: int
    transposed: bool


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json.

    Raises:
        ModelError: GGUF names of it are not known here, or it needs what a GGUF file made here cannot say.
    """
    names = config.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ModelError(f"{where}: no GGUF names are known for {names}; known: {', '.join(FAMILIES)}")
    width = _head_dim(config)
    if family.scalar_is_width and config.get("query_pre_attn_scalar", width) != width:
        raise ModelError(
            f"{where}: query_pre_attn_scalar is {config['query_pre_attn_scalar']} and heads are {width} wide; "
            "llama.cpp scales attention by the width"
        )
    return family


def make_metadata(source: Source, family: Family, file_type: int) -> dict[str, Any]:
    """All entries of the file.

    Args:
        source: the checkpoint.
        family: of its model.
        file_type: ggml's number for what most tensors are.
    Raises:
        ModelError: config.json lacks a number, or the tokenizer or the positions cannot be said in GGUF.
    """
    config, where = source.reader.config, source.reader.path
    entries: dict[str, Any] = {
        "general.architecture": family.name,
        "general.type": "model",
        "general.name": where.resolve().name,
        "general.file_type": file_type,
        "general.quantization_version": 2,
    }
    defaults = {"n_inner": 4 * config["n_embd"]} if "n_embd" in config else {}
    defaults["num_key_value_heads"] = config.get("num_attention_heads")
    for key, name in family.numbers.items():
        value = config.get(name) if config.get(name) is not None else defaults.get(name)
        if value is None and key in ("block_count", "embedding_length", "attention.head_count", "context_length"):
            raise ModelError(f"{where}/config.json has no {name!r}, which a GGUF file needs")
        if value is not None:
            entries[f"{family.name}.{key}"] = float(value) if "epsilon" in key or "softcapping" in key else int(value)
    if family.rotary:
        entries |= {f"{family.name}.{key}": value for key, value in _rotary(config, str(where)).items()}
    rows = source.reader.info(f"{_module(source, next(iter(family.outer)))}.weight").shape[0]
    return {**entries, **read_vocab(where, config, rows)}


def list_pieces(source: Source, family: Family) -> list[Piece]:
    """Every tensor of the file in its order.

    Raises:
        ModelError: the checkpoint has a module that the family does not name.
    """
    config, pieces = source.reader.config, []
    tied = bool(config.get("tie_word_embeddings"))
    for module, locals_ in source.modules.items():
        plain = (
            "transformer." if family.name == "gpt2" and not module.startswith(("transformer.", "lm_head")) else ""
        ) + module
        if any(f"{plain}.{local}".endswith(_LEFT_OUT) for local in locals_) or (tied and plain == "lm_head"):
            continue
        name, relative = _gguf_name(family, plain)
        if name is None:
            raise ModelError(f"{source.reader.path}: {module} has no place in a GGUF file of {family.name}")
        shape = source.shape(module) if module in source.linears else None
        for local in ("weight", "bias"):
            if local not in locals_ and not (local == "weight" and shape):
                continue
            is_norm = relative.endswith("norm") or relative.startswith(("ln_", "transformer.ln_"))
            found = shape if local == "weight" and shape else source.reader.info(f"{module}.{local}").shape
            transposed = family.transposed and len(found) == 2 and relative != plain
            pieces.append(
                Piece(
                    name=f"{name}.{local}",
                    module=module,
                    local=local,
                    shape=tuple(reversed(found)) if transposed else tuple(found),
                    is_norm=is_norm and local == "weight",
                    is_layer=relative != plain,
                    interleave=_heads(config, relative) if relative in family.interleaved else 0,
                    transposed=transposed,
                )
            )
    return pieces


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of q or k with the two halves of each head interleaved, as llama.cpp rotates neighbours."""
    if not heads:
        return rows
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def long_range_factors(config: Mapping[str, Any]) -> Tensor | None:
    """Divisors of the rotary frequencies of Llama 3.1 and later; None for other models."""
    scaling = _rope(config)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    width, theta = _head_dim(config), float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    factor, old = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    divisors = []
    for pair in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (pair / width)
        smooth = min(1.0, max(0.0, (old / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


def _rotary(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    rope, width = _rope(config), _head_dim(config)
    partial = float(config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    entries: dict[str, Any] = {"rope.dimension_count": int(width * partial), "rope.freq_base": theta}
    if config.get("head_dim"):
        entries |= {"attention.key_length": width, "attention.value_length": width}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "yarn"):
        entries |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if "original_max_position_embeddings" in rope:
            entries["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    elif kind not in ("default", "llama3", None):
        raise ModelError(f"{where}/config.json has rope scaling of type {kind!r}, which is not written to GGUF here")
    return entries


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Everything about rotary positions, which config.json keeps under two names; that of full attention layers."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    full = found.get("full_attention")
    return full if isinstance(full, Mapping) else found


def _head_dim(config: Mapping[str, Any]) -> int:
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    return int(config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads)


def _heads(config: Mapping[str, Any], relative: str) -> int:
    heads = int(config["num_attention_heads"])
    return int(config.get("num_key_value_heads") or heads) if relative.endswith("k_proj") else heads


def _gguf_name(family: Family, module: str) -> tuple[str | None, str]:
    """Name in the file without `.weight`, and the name relative to the layer (or the full one outside of layers)."""
    if module in family.outer:
        return family.outer[module], module
    if not module.startswith(f"{family.prefix}."):
        return None, module
    number, _, relative = module.removeprefix(f"{family.prefix}.").partition(".")
    name = family.layers.get(relative)
    return (f"blk.{number}.{name}" if name and number.isdecimal() else None), relative


def _module(source: Source, name: str) -> str:
    """A module that may lack the prefix that transformers leaves out in some files."""
    if name in source.modules:
        return name
    short = name.removeprefix("transformer.")
    if short not in source.modules:
        raise ModelError(f"{source.reader.path} has no {name}.weight; the download may be incomplete")
    return short
