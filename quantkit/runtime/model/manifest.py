"""Which tensors a model of this config has, and whether a checkpoint has exactly those; no tensor is read.

Shapes of quantized linears follow from their scheme and are checked when they are decoded; here their number of rows
and columns is, as far as headers and `weight_shape` tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError
from quantkit.models.family import Family, QueryKeyNorm
from quantkit.numerics.scheme import Scheme
from quantkit.runtime.model.config import ExpertsConfig, ModelConfig

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


def make_manifest(config: ModelConfig, reader: CheckpointReader) -> Manifest:
    """The tensors of a model.

    Args:
        config: the model.
        reader: its checkpoint; asked only for names, where a family stores something in one of two ways.
    """
    data, hidden = config.family, config.hidden_size
    manifest = Manifest(linears={}, tensors={f"{data.embedding}.weight": (config.vocab_size, hidden)}, optional={})
    for index, layer in enumerate(config.layers):
        prefix = f"{data.layers}.{index}."
        _add_attention(manifest, config, prefix)
        _add_norms(manifest, config, [name for name in norm_names(config) if name is not None], prefix)
        if layer.has_experts and config.experts is not None:
            _add_experts(manifest, config, config.experts, prefix, reader)
        else:
            _add_mlp(manifest, data.parts.up, data.parts.down, prefix, hidden, config.width, data.parts.gated)
    _add_norms(manifest, config, [data.final_norm], "")
    if not config.tied:
        manifest.linears[head_name(data, reader)] = (config.vocab_size, hidden)
    return manifest


def head_name(family: Family, reader: CheckpointReader) -> str:
    """The output head's name in this checkpoint."""
    stored = family.stored_head
    return stored if stored is not None and f"{stored}.weight" in reader else family.head


def per_head(name: str, num_heads: int) -> list[str]:
    """Module names of a norm that may be one module per head."""
    return [name.format(head=head) for head in range(num_heads)] if "{head}" in name else [name]


def is_stacked(config: ModelConfig, prefix: str, reader: CheckpointReader) -> bool:
    """Whether the experts of a layer are stored as one tensor."""
    data = config.family.experts
    return data is not None and f"{prefix}{data.stacked_up}" in reader


def norm_names(config: ModelConfig) -> tuple[str | None, ...]:
    """Names of a layer's norms: before and after attention, before and after the MLP; None = there is none."""
    parts = config.family.parts
    has_mlp_norm = parts.parallel_mlp_norm or not config.parallel
    return parts.input_norm, parts.attention_norm, parts.mlp_norm if has_mlp_norm else None, parts.output_norm


def _add_norms(manifest: Manifest, config: ModelConfig, names: Iterable[str], prefix: str) -> None:
    for name in names:
        manifest.tensors[f"{prefix}{name}.weight"] = (config.hidden_size,)
        if config.family.norm == "layer":
            manifest.optional[f"{prefix}{name}.bias"] = (config.hidden_size,)


def _add_attention(manifest: Manifest, config: ModelConfig, prefix: str) -> None:
    parts, norm = config.family.parts, config.family.qk_norm
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (queries, keys, keys) if len(parts.qkv) == 3 else (queries + 2 * keys,)
    for name, count in zip(parts.qkv, rows, strict=True):
        manifest.linears[prefix + name] = (count, config.hidden_size)
    manifest.linears[prefix + parts.output] = (config.hidden_size, queries)
    if norm is not None and config.qk_norm:
        _add_query_key_norm(manifest, config, norm, prefix)


def _add_query_key_norm(manifest: Manifest, config: ModelConfig, norm: QueryKeyNorm, prefix: str) -> None:
    for name, heads in ((norm.query, config.num_heads), (norm.key, config.num_kv_heads)):
        shape: tuple[int, ...] = (config.head_dim,)
        if norm.over == "projection":
            shape = (heads * config.head_dim,)
        elif norm.over == "heads" and "{head}" not in name:
            shape = (heads, config.head_dim)
        for module in per_head(name, heads):
            manifest.tensors[f"{prefix}{module}.weight"] = shape
            if config.family.norm == "layer":
                manifest.optional[f"{prefix}{module}.bias"] = shape


def _add_mlp(
    manifest: Manifest, up: tuple[str, ...], down: str, prefix: str, hidden: int, width: int, gated: bool
) -> None:
    rows = 2 * width if gated and len(up) == 1 else width
    manifest.linears.update({prefix + name: (rows, hidden) for name in up})
    manifest.linears[prefix + down] = (hidden, width)


def _add_experts(
    manifest: Manifest, config: ModelConfig, experts: ExpertsConfig, prefix: str, reader: CheckpointReader
) -> None:
    data, hidden = config.family.experts, config.hidden_size
    assert data is not None
    manifest.linears[prefix + data.router] = (experts.num_experts, hidden)
    if is_stacked(config, prefix, reader):
        manifest.tensors[prefix + data.stacked_up] = (experts.num_experts, 2 * experts.width, hidden)
        manifest.tensors[prefix + data.stacked_down] = (experts.num_experts, hidden, experts.width)
    else:
        for number in range(experts.num_experts):
            up = tuple(name.format(expert=number) for name in data.up)
            _add_mlp(manifest, up, data.down.format(expert=number), prefix, hidden, experts.width, True)
    if experts.shared_width is not None and data.shared_down is not None:
        _add_mlp(manifest, data.shared_up, data.shared_down, prefix, hidden, experts.shared_width, True)
    if data.shared_gate is not None:
        manifest.linears[prefix + data.shared_gate] = (1, hidden)


def check_tensors(manifest: Manifest, reader: CheckpointReader, scheme: Scheme | None, tied_head: str | None) -> None:
    """A checkpoint has what the manifest says, in the right shapes, and nothing else.

    Args:
        manifest: of the model.
        reader: of the checkpoint; only headers are read, and shapes that are stored as tensors.
        scheme: of its quantized linears; None = it has none.
        tied_head: an output head that may be stored although the embedding takes its place.
    Raises:
        CheckpointError: names the tensor, what was found and what was expected.
    """
    known = set(manifest.tensors) | set(manifest.optional)
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
        if name not in known and not _IGNORED.fullmatch(name) and name != f"{tied_head}.weight":
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
    found = tuple(reader.info(name).shape)
    if found != shape:
        raise CheckpointError(f"{reader.path}: tensor {name} has shape {found}, config.json says {shape}")


def _check_quantized(reader: CheckpointReader, name: str, shape: tuple[int, int]) -> None:
    """As far as can be told without unpacking."""
    found = _stored_shape(reader, name)
    for have in found:
        if have != shape:
            raise CheckpointError(
                f"{reader.path}: the quantized weight {name} has shape {have}, config.json says {shape}"
            )


def _stored_shape(reader: CheckpointReader, name: str) -> Iterator[tuple[int, ...]]:
    if f"{name}.weight_shape" in reader:
        yield tuple(reader.tensor(f"{name}.weight_shape").tolist())
    elif f"{name}.weight" in reader:
        yield tuple(reader.info(f"{name}.weight").shape)
