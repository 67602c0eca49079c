"""Names, number types and shapes of all tensors of a checkpoint, read from the shards' headers without torch.

`quantkit.checkpoints` reads the same headers, checks them down to the last byte and gives torch types; here an answer
in a tenth of a second counts, and a damaged file only has to be named.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.planning.config import Config
from quantkit.planning.families import is_sparse, max_length, stored_dtype
from quantkit.planning.shape import Layer, Matrix, ModelShape

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}
_IN_LAYER = re.compile(r"(.*?(?:layers|h|blocks))\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_ROUTERS = ("gate", "router", "weights_proj", "shared_expert_gate", "classifier")
_HEADS = ("lm_head", "embed_out", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor on disk: its shape, its safetensors type and its bytes."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def read_tensors(folder: Path) -> dict[str, Stored] | None:
    """All tensors of a checkpoint by name; None when a shard is missing or there is none.

    Args:
        folder: of the model.
    Raises:
        CheckpointError: a file is there and is not safetensors, or the index is not readable.
    """
    index = folder / _INDEX
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        names = set(_object(index, index.read_bytes()).get("weight_map", {}).values())
        files = [folder / str(name) for name in sorted(names, key=str)]
    if not files or not all(path.is_file() for path in files):
        return None
    tensors: dict[str, Stored] = {}
    for path in files:
        tensors.update(_read_header(path))
    return tensors


def from_headers(config: Config, name: str, tensors: dict[str, Stored]) -> ModelShape:
    """Count a model from its tensors; only its attention is taken from the config.

    Args:
        config: of the model.
        name: for people.
        tensors: as `read_tensors` gives them, of a checkpoint that is not quantized.
    Raises:
        ModelError: the config does not say what the cache holds.
        CheckpointError: the tensors are not those of as many layers as the config names.
    """
    prefix, inside, outside = _split(tensors)
    attentions = config.attentions()
    found = {index for index, _, _ in inside}
    # Checkpoints may carry more layers than the model runs (MTP); those are not counted.
    if not set(range(len(attentions))) <= found:
        raise CheckpointError(
            f"{config.where} names {len(attentions)} layers, but the shards hold {len(found)}; "
            "config.json and weights do not belong together: download them again"
        )
    layers = tuple(
        _layer(config, index, [(local, stored) for at, local, stored in inside if at == index], attention)
        for index, attention in enumerate(attentions)
    )
    root = prefix.rpartition(".")[0]
    embedding, head, tables = _ends(config, outside)
    rest = sum(
        math.prod(stored.shape)
        for tensor, stored in outside.items()
        if tensor not in tables and (not config.has_more or tensor.startswith(f"{root}."))
    )
    extra = len(found) - len(attentions)
    remarks = [f"{extra} more layers in the shards (MTP) are not counted"] if extra > 0 else []
    remarks += ["the language model only: vision and audio parts are not counted"] if config.has_more else []
    return ModelShape(
        name=name,
        family=config.family,
        counted_from="shard headers",
        dtype=_main_dtype(config, tensors),
        hidden_size=config.hidden_size,
        vocab_size=embedding // config.hidden_size,
        max_length=max_length(config),
        layers=layers,
        prefix=prefix,
        embedding=embedding,
        head=head,
        other=rest,
        stored_bytes=sum(stored.num_bytes for stored in tensors.values()),
        remarks=tuple(remarks),
    )


def _layer(config: Config, index: int, tensors: list[tuple[str, Stored]], attention: Any) -> Layer:
    sparse = is_sparse(config, index)
    active = config.get("num_experts_per_tok", "num_experts_per_token", default=1) if sparse else 1
    sizes: Counter[tuple[str, int, int]] = Counter()
    other = 0
    for local, stored in tensors:
        matrices_here = _matrix_sizes(local, stored.shape, transposed=config.family == "gpt_oss")
        if not matrices_here:
            other += math.prod(stored.shape)
        sizes.update(matrices_here)
    matrices = tuple(
        Matrix(
            name=name,
            out_features=rows,
            in_features=columns,
            copies=count,
            active=min(active, count) if "experts" in name.split(".") else count,
            quantizable=name.rpartition(".")[2] not in _ROUTERS,
        )
        for (name, rows, columns), count in sizes.items()
    )
    return Layer(attention=attention, matrices=matrices, other=other)


def _matrix_sizes(local: str, shape: tuple[int, ...], *, transposed: bool) -> dict[tuple[str, int, int], int]:
    """Copies of each linear in a tensor by its name, N and K; nothing for what is no linear's weight.

    Args:
        local: name of the tensor in its layer.
        shape: of the tensor; with three dimensions it holds all experts, gate and up together.
        transposed: it then has the inputs before the outputs.
    """
    name = _EXPERT.sub("experts.0.", local.removesuffix(".weight"))
    if len(shape) == 3 and "experts" in name.split("."):
        count, rows, columns = shape if not transposed else (shape[0], shape[2], shape[1])
        owner, _, leaf = name.rpartition(".")
        if leaf != "gate_up_proj":
            return {(f"{owner}.0.{leaf}", rows, columns): count}
        return {(f"{owner}.0.{part}", rows // 2, columns): count for part in ("gate_proj", "up_proj")}
    if len(shape) != 2 or not local.endswith(".weight"):
        return {}
    return {(name, shape[0], shape[1]): 1}


def _split(tensors: dict[str, Stored]) -> tuple[str, list[tuple[int, str, Stored]], dict[str, Stored]]:
    """Where the decoder layers are, what is in them, and what is outside; of several stacks the largest is meant."""
    matches = {name: match for name in tensors if (match := _IN_LAYER.fullmatch(name))}
    weight: Counter[str] = Counter()
    for name, match in matches.items():
        weight[match[1]] += math.prod(tensors[name].shape)
    prefix = weight.most_common(1)[0][0] if weight else "model.layers"
    inside = [(int(m[2]), m[3], tensors[name]) for name, m in matches.items() if m[1] == prefix]
    outside = {name: stored for name, stored in tensors.items() if name not in matches or matches[name][1] != prefix}
    return prefix, inside, outside


def _ends(config: Config, outside: dict[str, Stored]) -> tuple[int, int, set[str]]:
    """Parameters of the embedding and of the head, and the names of both; a head that is the embedding counts nothing.

    Of several tables, such as those of a vision tower, the largest is that of the tokens.
    """
    heads, embeddings = {}, {}
    for name, stored in outside.items():
        if len(stored.shape) != 2 or stored.shape[1] != config.hidden_size or not name.endswith(".weight"):
            continue
        module = f".{name}".split(".")[-2]
        if module in _HEADS:
            heads[name] = math.prod(stored.shape)
        elif module == "wte" or "embed" in module:
            embeddings[name] = math.prod(stored.shape)
    if not embeddings:
        raise CheckpointError(f"{config.where}: the shards hold no token embedding of width {config.hidden_size}")
    table = max(embeddings, key=lambda name: embeddings[name])
    tied = config.flag("tie_word_embeddings") or not heads
    return embeddings[table], 0 if tied else max(heads.values()), {table, *heads}


def _main_dtype(config: Config, tensors: dict[str, Stored]) -> str:
    """The number type that most bytes are in."""
    count: Counter[str] = Counter()
    for stored in tensors.values():
        count[_DTYPES.get(stored.dtype, "")] += stored.num_bytes
    return count.most_common(1)[0][0] or stored_dtype(config)


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check that it exists and is readable") from None
    header = _object(path, text if len(text) == length else b"")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any) -> Stored:
    try:
        shape, dtype = tuple(int(size) for size in entry["shape"]), str(entry["dtype"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path}: the entry of tensor {name!r} is damaged; download the file again") from None
    expected = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if dtype in _ITEM_BYTES and end - start != expected:  # 4- and 6-bit types pack several elements into a byte
        raise CheckpointError(
            f"{path}: tensor {name!r} takes {end - start} bytes, its shape {shape} of {dtype} needs {expected}; "
            "the file is damaged: download it again"
        )
    return Stored(shape=shape, dtype=dtype, num_bytes=end - start)


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        what = "the index" if path.name == _INDEX else "its safetensors header"
        raise CheckpointError(f"{path}: {what} cannot be read; the file is truncated or damaged: download it again")
    return data
