"""Count the parameters and bytes of a model of any family, from its config or, more exactly, from its shard headers."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantkit.checkpoints.header import TensorInfo
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.description import ModelDescription
from quantkit.models.layer_tensors import LayerTensors, Matrix, outer_tensors
from quantkit.models.mtp import head_tensors, mtp_heads, mtp_prefixes
from quantkit.planning.shape import DTYPE_BYTES, ModelShape

_IN_LAYER = re.compile(r"(.*?(?:layers|h|blocks))\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_ROUTERS = ("gate", "router", "weights_proj", "shared_expert_gate", "classifier")
_HEADS = ("lm_head", "embed_out", "output")
TOWERS = "only the language model is counted, without vision and audio towers"


def from_config(model: ModelDescription, name: str, counted_from: str) -> ModelShape:
    """Count a model's parameters from its config.

    Args:
        model: description from config.json.
        name: name for reports.
        counted_from: source of the config, for reports.
    Raises:
        ModelError: a size is missing.
    """
    embedding = model.vocab_size * model.hidden_size
    return ModelShape(
        **_facts(model, name),
        counted_from=counted_from,
        dtype=_stored_dtype(model),
        vocab_size=model.vocab_size,
        layers=tuple(map(model.tensors, range(model.num_layers))),
        prefix=model.family.layers,
        embedding=embedding,
        head=0 if model.tied else embedding,
        other=sum(map(math.prod, outer_tensors(model).values())) + model.vocab_size * model.family.biases.head,
        mtp=(heads := head_shapes(model)),
        mtp_parameters=sum({name: size for head in heads for name, size in _named_sizes(head)}.values()),
        remarks=tuple(_remarks(model)),
    )


def from_headers(model: ModelDescription, name: str, tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """Count a model's parameters and bytes from its tensor headers; only the attention settings come from the config.

    Args:
        model: description from config.json.
        name: name for reports.
        tensors: headers of the tensors of an unquantized checkpoint, keyed by name.
    Raises:
        ModelError: the config does not define what the cache holds.
        CheckpointError: the number of layers in the tensors differs from the config.
    """
    prefixes = mtp_prefixes(model)
    drafts = {name: stored for name, stored in tensors.items() if name.startswith(prefixes)}
    prefix, inside, outside = _split({name: stored for name, stored in tensors.items() if name not in drafts})
    present = {index for index, _, _ in inside}
    # Checkpoints may have more layers than the model runs, even if config.json does not say so.
    if not set(range(model.num_layers)) <= present:
        raise CheckpointError(
            f"{model.entries.where} names {model.num_layers} layers, but the shards hold {len(present)}; config.json "
            "and weights do not match: download them again"
        )
    layers = tuple(
        _layer(model, index, [(local, stored) for at, local, stored in inside if at == index])
        for index in range(model.num_layers)
    )
    root = prefix.rpartition(".")[0]
    embedding, head, tables = _ends(model, outside)
    wrapped = model.entries.is_wrapped
    # In a wrapper, every tensor outside the language model's root belongs to a vision or audio tower.
    rest = sum(
        math.prod(stored.shape)
        for tensor, stored in outside.items()
        if tensor not in tables and (not wrapped or tensor.startswith(f"{root}."))
    )
    extra = len(present) - model.num_layers
    remarks = [f"{extra} further layers in the shards (multi-token prediction) are not counted"] if extra > 0 else []
    remarks += [TOWERS] if wrapped else []
    return ModelShape(
        **_facts(model, name),
        counted_from="shard headers",
        dtype=_main_dtype(model, tensors),
        # From the embedding, which may be padded to more rows than config.json says.
        vocab_size=embedding // model.hidden_size,
        layers=layers,
        prefix=prefix,
        embedding=embedding,
        head=head,
        other=rest,
        mtp=head_shapes(model, tensors),
        mtp_parameters=sum(math.prod(stored.shape) for stored in drafts.values()),
        mtp_stored_bytes=sum(stored.num_bytes for stored in drafts.values()),
        stored_bytes=sum(stored.num_bytes for stored in tensors.values()),
        remarks=tuple(remarks),
    )


def head_shapes(model: ModelDescription, names: Collection[str] | None = None) -> tuple[LayerTensors, ...]:
    """Return the tensors of each MTP head; see `mtp_heads` for the arguments."""
    return tuple(head_tensors(model, head) for head in mtp_heads(model, names))


def _named_sizes(tensors: LayerTensors) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of parameters of every matrix and vector; heads may share some."""
    yield from ((matrix.name, matrix.num_parameters + matrix.bias * matrix.out_features) for matrix in tensors.matrices)
    yield from ((name, math.prod(shape)) for name, shape in tensors.vectors.items())


def _facts(model: ModelDescription, name: str) -> dict[str, Any]:
    """Return the fields of a `ModelShape` that only config.json defines."""
    length = model.entries.optional_count("max_position_embeddings")
    sizes = {"hidden_size": model.hidden_size, "max_length": length}
    return {"name": name, "family": model.family, "model_type": _model_type(model), **sizes}


def _model_type(model: ModelDescription) -> str:
    return str(model.entries.get("model_type") or "llama")


def _stored_dtype(model: ModelDescription) -> str:
    """Return the number type in config.json; bfloat16 if it names none (`auto`)."""
    name = model.entries.text("dtype", default="bfloat16")
    if name not in DTYPE_BYTES and name != "auto":
        raise ModelError(
            f"{model.entries.where}: dtype {name!r} is not supported by plan; supported: {', '.join(DTYPE_BYTES)}"
        )
    return "bfloat16" if name == "auto" else name


def _remarks(model: ModelDescription) -> Iterator[str]:
    if not model.family.known:
        name = _model_type(model)
        yield f"family {name!r} is unknown and is counted like Llama; a directory with the weights gives an exact count"
    if model.entries.is_wrapped:
        yield TOWERS
    if model.family.mtp is None and model.entries.optional_count("num_nextn_predict_layers"):
        yield "the layers that predict several tokens at once (MTP) are not counted"
    if "quantization_config" in model.entries.entries:
        yield "config.json says that the weights are already quantized; their bytes are counted as if they were not"


def _layer(model: ModelDescription, index: int, tensors: list[tuple[str, TensorInfo]]) -> LayerTensors:
    active = model.experts.num_chosen if model.experts is not None and model.with_experts[index] else 1
    sizes: Counter[tuple[str, int, int]] = Counter()
    vectors: dict[str, tuple[int, ...]] = {}
    data, recurrent = model.family.experts, model.family.recurrent
    ignored = set() if recurrent is None else {recurrent.name(part) for part in recurrent.gates}
    if model.family.block is not None:
        ignored |= {matrix.name for matrix in model.tensors(index).matrices if not matrix.quantizable}
    for local, stored in tensors:
        linears = _matrix_sizes(local, stored.shape, transposed=data is not None and data.transposed)
        if not linears:
            vectors[local] = stored.shape
        sizes.update(linears)
    matrices = tuple(
        Matrix(
            name=name,
            out_features=rows,
            in_features=columns,
            copies=count,
            active=min(active, count) if "experts" in name.split(".") else count,
            quantizable=name.rpartition(".")[2] not in _ROUTERS and name not in ignored,
        )
        for (name, rows, columns), count in sizes.items()
    )
    return LayerTensors(matrices=matrices, vectors=vectors, attention=model.attention(index))


def _matrix_sizes(local: str, shape: tuple[int, ...], *, transposed: bool) -> dict[tuple[str, int, int], int]:
    """Return the number of copies of each linear in a tensor, keyed by (name, N, K); empty if the tensor holds none.

    Args:
        local: name of the tensor within its layer.
        shape: shape of the tensor; a tensor with three dimensions holds all experts, possibly with gate and up fused.
        transposed: whether inputs come before outputs in the shape.
    """
    name = _EXPERT.sub("experts.{expert}.", local.removesuffix(".weight"))
    if len(shape) == 3 and "experts" in name.split("."):
        count, rows, columns = shape if not transposed else (shape[0], shape[2], shape[1])
        owner, _, leaf = name.rpartition(".")
        if leaf != "gate_up_proj":
            return {(f"{owner}.{{expert}}.{leaf}", rows, columns): count}
        return {(f"{owner}.{{expert}}.{part}", rows // 2, columns): count for part in ("gate_proj", "up_proj")}
    if len(shape) != 2 or not local.endswith(".weight"):
        return {}
    return {(name, shape[0], shape[1]): 1}


def _split(tensors: Mapping[str, TensorInfo]) -> tuple[str, list[tuple[int, str, TensorInfo]], dict[str, TensorInfo]]:
    """Return the prefix of the decoder layers, their tensors as (layer, name in the layer, header), and other tensors.

    If there are several stacks of layers, the largest stack counts as the decoder.
    """
    matches = {name: match for name in tensors if (match := _IN_LAYER.fullmatch(name))}
    weight: Counter[str] = Counter()
    for name, match in matches.items():
        weight[match[1]] += math.prod(tensors[name].shape)
    prefix = weight.most_common(1)[0][0] if weight else "model.layers"
    inside = [(int(m[2]), m[3], tensors[name]) for name, m in matches.items() if m[1] == prefix]
    outside = {name: stored for name, stored in tensors.items() if name not in matches or matches[name][1] != prefix}
    return prefix, inside, outside


def _ends(model: ModelDescription, outside: dict[str, TensorInfo]) -> tuple[int, int, set[str]]:
    """Return the numbers of parameters of embedding and head, and the names of their tensors; a tied head counts zero.

    If there are several embeddings, such as one in a vision tower, the largest is the token embedding.
    """
    heads, embeddings = {}, {}
    for name, stored in outside.items():
        if len(stored.shape) != 2 or stored.shape[1] != model.hidden_size or not name.endswith(".weight"):
            continue
        module = f".{name}".split(".")[-2]
        if module in _HEADS:
            heads[name] = math.prod(stored.shape)
        elif module == "wte" or "embed" in module:
            embeddings[name] = math.prod(stored.shape)
    if not embeddings:
        raise CheckpointError(
            f"{model.entries.where} gives the hidden size {model.hidden_size}, but the shards have no token embedding "
            "of that width; download the model again"
        )
    table = max(embeddings, key=lambda name: embeddings[name])
    # Only config.json decides, not the family's default: a head that is stored beside the embedding counts.
    tied = bool(model.entries.entries.get("tie_word_embeddings")) or not heads
    return embeddings[table], 0 if tied else max(heads.values()), {table, *heads}


def _main_dtype(model: ModelDescription, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the number type that accounts for the most bytes of the tensors."""
    count: Counter[str] = Counter()
    for stored in tensors.values():
        count[stored.dtype_name or ""] += stored.num_bytes
    name = count.most_common(1)[0][0]
    return name if name in DTYPE_BYTES else _stored_dtype(model)
