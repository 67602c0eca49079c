"""Derive the tensors and metadata of a GGUF file from a checkpoint's headers, config.json and tokenizer.json.

Two kinds of tokenizer are supported. For byte-level BPE ("gpt2"), llama.cpp must know the pre-tokenizer by name. For
BPE with byte fallback, converted from SentencePiece ("llama"), merges become scores; earlier merges get higher scores.
Source: llama.cpp `convert_hf_to_gguf.py` (get_vocab_base_pre), `src/llama-vocab.cpp`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.gguf_tokenizer import BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, UNKNOWN, UNUSED, USER
from quantkit.compress.convert.source import Source
from quantkit.errors import ModelError, first_line, located
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
from quantkit.safety.untrusted import read_object, read_text, shorten

# Ends of the names of tensors to leave out: buffers in old files, which every reader computes itself.
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
        interleave: number of heads whose rows are reordered, see the function `interleave`; 0 = rows keep their order.
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
        file_type: number that ggml gives the type of the whole file (`gguf.LlamaFileType`).
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
            raise ModelError(f"{where}/config.json has no {config_key!r}, which a GGUF file needs; add it")
        if value is not None:
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ModelError(f"{where}/config.json: {config_key!r} is {shorten(value)}; expected a finite number")
            # The Python type decides the type in the file, and llama.cpp accepts only one type for each entry.
            entries[f"{name}.{key}"] = float(value) if "epsilon" in key or "softcapping" in key else int(value)
    if names.rotary:
        entries |= {f"{name}.{key}": value for key, value in _rotary(model).items()}
    embedding = next(
        (name for name in source.modules if _full_name(model.family, name) == model.family.embedding), None
    )
    if embedding is None:
        raise ModelError(f"{where} has no tensor {model.family.embedding}.weight; download the model again")
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
                f"as a GGUF file of architecture {_names(family).name}; choose another format"
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


def read_vocab(folder: Path, config: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Return the metadata entries of a GGUF file that describe the tokenizer; all keys begin with `tokenizer.`.

    Args:
        folder: folder of the model, with tokenizer.json.
        config: contents of config.json.
        num_rows: number of rows of the embedding; a smaller vocabulary is padded to this size.
    Raises:
        ModelError: tokenizer.json is missing or damaged, or llama.cpp does not support the tokenizer.
    """
    try:
        return _read_vocab(folder, config, num_rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}/tokenizer.json is not a valid tokenizer ({type(error).__name__}: {first_line(error)}); "
            "download or copy it again"
        ) from error


def _read_vocab(folder: Path, config: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    with located("a GGUF file needs the model's tokenizer"):
        data = read_object(folder / "tokenizer.json", ModelError)
        file = folder / "tokenizer_config.json"
        settings = read_object(file, ModelError) if file.is_file() else {}
    model = data.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(
            f"{folder}/tokenizer.json: tokenizer type {model.get('type')!r} is not supported in GGUF; supported: BPE"
        )
    added = {entry["id"]: entry for entry in data.get("added_tokens") or []}
    tokens, types = _tokens(folder, model["vocab"], added, num_rows, byte_tokens=bool(model.get("byte_fallback")))
    merges = [" ".join(merge if isinstance(merge, list) else [merge]) for merge in model.get("merges") or []]
    splits = list(_flat(data.get("pre_tokenizer")))
    if model.get("byte_fallback"):
        prefix = any(step.get("type") == "Prepend" for step in _flat(data.get("normalizer")))
        entries: dict[str, Any] = {
            "ggml.model": "llama",
            "ggml.pre": "default",
            "ggml.tokens": tokens,
            "ggml.scores": _scores(tokens, merges),
            "ggml.token_type": types,
            "ggml.add_space_prefix": prefix or any(step.get("prepend_scheme") == "first" for step in splits),
        }
    else:
        entries = {"ggml.model": "gpt2", "ggml.pre": _split_name(folder, splits), "ggml.tokens": tokens}
        entries |= {"ggml.token_type": types, "ggml.merges": merges or ["  "]}
    entries |= _special(data, settings, config, {token: number for number, token in enumerate(tokens)})
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = read_text(folder / "chat_template.jinja", ModelError)
    if isinstance(template, str):
        entries["chat_template"] = template
    return {f"tokenizer.{key}": value for key, value in entries.items()}


def _tokens(
    folder: Path, vocab: Mapping[str, int], added: Mapping[int, Any], num_rows: int, *, byte_tokens: bool
) -> tuple[list[str], list[int]]:
    """Return the token text and token type for every row of the embedding."""
    tokens, types = [f"[PAD{number}]" for number in range(num_rows)], [UNUSED] * num_rows
    byte = re.compile("<0x..>" if byte_tokens else "(?!)", re.DOTALL)
    rows = [(number, token, BYTE if byte.fullmatch(token) else NORMAL) for token, number in vocab.items()]
    # Added tokens come last and override the vocabulary.
    rows += [(number, entry["content"], _added_type(entry, byte_tokens)) for number, entry in added.items()]
    for number, token, kind in rows:
        if not isinstance(token, str):
            raise TypeError(f"the token with id {number} is not a string")
        if not 0 <= number < num_rows:
            raise ModelError(
                f"{folder}/tokenizer.json: token {token!r} has id {number}, but the embedding has {num_rows} rows; "
                "download the tokenizer and the weights again"
            )
        tokens[number], types[number] = token, kind
    return tokens, types


def _added_type(entry: Mapping[str, Any], byte_tokens: bool) -> int:
    if byte_tokens and entry["content"] == "<unk>":
        return UNKNOWN
    return CONTROL if entry.get("special") else USER


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return the score of each token: minus the rank of the first merge that forms it. Unmerged tokens come last."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges) + number)) for number, token in enumerate(tokens)]


def _split_name(folder: Path, splits: list[Mapping[str, Any]]) -> str:
    steps = tuple(map(_described, splits))
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == steps), None)
    if name is not None:
        return name
    raise ModelError(
        f"{folder}/tokenizer.json splits text by {list(steps)}, which is not supported in GGUF; "
        f"supported: {', '.join(PRE_TOKENIZERS)}"
    )


def _described(step: Mapping[str, Any]) -> tuple[str, Any]:
    kind = str(step.get("type"))
    if kind == "Split":
        return kind, (step.get("pattern") or {}).get("Regex")
    return kind, step.get({"ByteLevel": "use_regex", "Digits": "individual_digits"}.get(kind, ""), True)


def _flat(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if not isinstance(step, Mapping):
        return
    inner = step.get("normalizers") or step.get("pretokenizers")
    yield from [step] if inner is None else (item for part in inner for item in _flat(part))


def _special(
    data: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return the ids of special tokens, and whether the tokenizer adds the bos and eos tokens to a text."""
    entries: dict[str, Any] = {}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _special_token(settings, kind)
        number = ids.get(token) if isinstance(token, str) else None
        if number is None:
            number = config.get(f"{kind}_token_id")
            number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and number >= 0:  # early Llamas have -1 for "none"
            entries[f"ggml.{key}_token_id"] = number
    single = json.dumps((data.get("post_processor") or {}).get("single") or data.get("post_processor") or "")
    for kind in ("bos", "eos"):
        # The tokenizer's own post-processor decides, not tokenizer_config.json.
        token = _special_token(settings, kind)
        is_added = isinstance(token, str) and f'"SpecialToken": {{"id": {json.dumps(token)}' in single
        entries[f"ggml.add_{kind}_token"] = is_added
    return entries


def _special_token(settings: Mapping[str, Any], kind: str) -> Any:
    token = settings.get(f"{kind}_token")
    return token.get("content") if isinstance(token, Mapping) else token
