"""Names and shapes of the tensors of a decoder layer, from the family's names and the model's sizes. Torch-free.

N outputs and K inputs of a linear, D hidden, H query heads, J key/value heads, d channels of a head, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.models.linear_sets import EXPERT, at

if TYPE_CHECKING:
    from quantkit.models.description import LatentShape, ModelDescription
    from quantkit.models.family import QueryKeyNorm

Shapes = dict[str, tuple[int, ...]]
_INDEXER = "self_attn.indexer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A linear of a decoder layer, or copies of a linear in several experts.

    Args:
        name: name relative to the layer; `{expert}` stands for the number of each copy.
        out_features, in_features: N and K.
        copies: number of experts that have this linear; 1 if it belongs to no expert.
        active: number of copies that a token uses.
        quantizable: False for modules that are never quantized, such as routers.
        bias: whether each copy has a bias (N,), according to the family and config.json; files may differ.
    """

    name: str
    out_features: int
    in_features: int
    copies: int = 1
    active: int = 1
    quantizable: bool = True
    bias: bool = field(default=False, compare=False)

    @property
    def num_parameters(self) -> int:
        """Number of weights in all copies."""
        return self.copies * self.out_features * self.in_features

    @property
    def active_parameters(self) -> int:
        """Number of weights that a token uses."""
        return self.active * self.out_features * self.in_features

    @property
    def first(self) -> str:
        """Name of the first copy, e.g. `mlp.experts.0.up_proj`."""
        return at(self.name, 0)

    @property
    def names(self) -> Iterator[str]:
        """Names of all copies."""
        return (at(self.name, number) for number in range(self.copies)) if EXPERT in self.name else iter((self.name,))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """Tensors of one decoder layer.

    Args:
        matrices: the layer's linears, in execution order.
        vectors: shapes of all other tensors (norms, sinks, balances) except biases of linears, keyed by relative name.
        attention: shape of the layer's cache or state.
    """

    matrices: tuple[Matrix, ...]
    vectors: Mapping[str, tuple[int, ...]]
    attention: AttentionShape | StateShape

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are in no matrix."""
        biases = sum(matrix.copies * matrix.out_features for matrix in self.matrices if matrix.bias)
        return biases + sum(map(math.prod, self.vectors.values()))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the layer."""
        return self.other_parameters + sum(matrix.num_parameters for matrix in self.matrices)


def layer_tensors(model: ModelDescription, index: int) -> LayerTensors:
    """Return the tensors of one layer; see `ModelDescription.tensors`."""
    family = model.family
    vectors: Shapes = {}
    for norm in filter(None, norm_names(model)):
        vectors |= norm_shapes(model, norm, model.hidden_size)
    if family.block is not None:
        own = family.block(model.entries, index)
        matrices = list(own.matrices)
        vectors |= own.vectors
    elif model.latent is not None:
        matrices = list(_latent_matrices(model, model.latent))
        vectors |= _latent_norms(model.latent)
    elif model.only_mlp[index]:
        matrices = []
    elif family.recurrent is not None and model.recurrent[index]:
        matrices = list(family.recurrent.matrices(model.entries, model.hidden_size))
        vectors |= family.recurrent.vectors(model.entries)
    else:
        matrices = list(_attention_matrices(model))
    if family.qk_norm is not None and model.qk_norm and not model.recurrent[index]:
        vectors |= _query_key_norms(model, family.qk_norm)
    vectors |= _own_shapes(model, family.vectors)
    if model.with_experts[index]:
        matrices += _mixture(model)
        if family.experts is not None and family.experts.balance and model.experts is not None:
            rows = (family.experts.balance_rows,) if family.experts.balance_rows else ()
            vectors[family.experts.balance] = (*rows, model.experts.num_experts)
    elif model.only_mlp[index] or not family.one_half:
        bias = model.entries.flag(family.biases.mlp)
        matrices += _mlp(model, family.parts.up, family.parts.down, model.width, bias=bias, gated=family.parts.gated)
    return LayerTensors(matrices=tuple(matrices), vectors=vectors, attention=model.attention(index))


def model_tensors(model: ModelDescription) -> tuple[dict[str, tuple[int, int]], Shapes]:
    """Return the tensors that a checkpoint of a model must hold, without MTP heads.

    Returns:
        linears: (N, K) of each linear, keyed by full module name; a bias (N,) is optional.
        others: shape of each tensor that is never quantized, keyed by full name.
    """
    family, linears = model.family, dict[str, tuple[int, int]]()
    others: Shapes = {f"{family.embedding}.weight": (model.vocab_size, model.hidden_size), **outer_tensors(model)}
    for index in range(model.num_layers):
        prefix, layer = f"{family.layers}.{index}.", model.tensors(index)
        for matrix in layer.matrices:
            linears |= {prefix + name: (matrix.out_features, matrix.in_features) for name in matrix.names}
        others |= {prefix + name: shape for name, shape in layer.vectors.items()}
    if not model.tied:
        linears[family.head] = (model.vocab_size, model.hidden_size)
    return linears, others


def outer_tensors(model: ModelDescription) -> Shapes:
    """Return the shapes of the tensors outside the layers, e.g. of the final norm, keyed by full name.

    Embedding and head are left out.
    """
    return norm_shapes(model, model.family.final_norm, model.hidden_size) | _own_shapes(model, model.family.outside)


def _own_shapes(model: ModelDescription, shapes: Mapping[str, tuple[int | str, ...]]) -> Shapes:
    """Convert the sizes in shapes to numbers. A size may be a number, a key of config.json, or a product of keys."""

    def number(size: int | str) -> int:
        return size if isinstance(size, int) else math.prod(map(model.entries.count, size.split("*")))

    return {name: tuple(map(number, shape)) for name, shape in shapes.items()}


def norm_names(model: ModelDescription) -> tuple[str | None, ...]:
    """Return the names of a layer's norms: before and after attention, before and after the MLP; None = no norm."""
    parts = model.family.parts
    if model.family.one_half:
        return parts.input_norm, None, None, None
    has_mlp_norm = parts.parallel_mlp_norm or not model.parallel
    return parts.input_norm, parts.attention_norm, parts.mlp_norm if has_mlp_norm else None, parts.output_norm


def per_head(name: str, num_heads: int) -> list[str]:
    """Return the module names of a norm that may consist of one module per head."""
    return [name.format(head=head) for head in range(num_heads)] if "{head}" in name else [name]


def norm_shapes(model: ModelDescription, name: str, *shape: int, bias: bool = True) -> Shapes:
    """Return the shapes of a norm's weight and bias, keyed by name, as far as the family's norms have them."""
    kind, biased = model.family.norm, bias and model.family.biases.norms
    parts = () if kind == "bare" else ("weight", "bias") if kind == "layer" and biased else ("weight",)
    return {f"{name}.{part}": shape for part in parts}


def _query_key_norms(model: ModelDescription, norm: QueryKeyNorm) -> Shapes:
    vectors: Shapes = {}
    for name, heads in ((norm.query, model.num_heads), (norm.key, model.num_kv_heads)):
        shape: tuple[int, ...] = (model.head_dim,)
        if norm.over == "projection":
            shape = (heads * model.head_dim,)
        elif norm.over == "heads" and "{head}" not in name:
            shape = (heads, model.head_dim)
        for module in per_head(name, heads):
            vectors |= norm_shapes(model, module, *shape, bias=norm.bias)
    return vectors


def _attention_matrices(model: ModelDescription) -> Iterator[Matrix]:
    parts, biases, hidden = model.family.parts, model.family.biases, model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    gates = queries if parts.gated_query else 0
    rows = (queries + gates, keys, keys) if len(parts.qkv) == 3 else (queries + 2 * keys,)
    bias = model.entries.flag(biases.qkv)
    for name, count in zip(parts.qkv, rows, strict=True):
        yield Matrix(name=name, out_features=count, in_features=hidden, bias=bias)
    bias = model.entries.flag(biases.output)
    yield Matrix(name=parts.output, out_features=hidden, in_features=queries, bias=bias)


def _latent_matrices(model: ModelDescription, sizes: LatentShape) -> Iterator[Matrix]:
    """Yield the matrices of DeepSeek's latent attention: projections down to a latent vector and up from it."""
    hidden, heads, keys = model.hidden_size, model.num_heads, sizes.plain_dim + sizes.rope_dim
    queries = [("q_proj", heads * keys, hidden)]
    if sizes.query_rank:
        queries = [("q_a_proj", sizes.query_rank, hidden), ("q_b_proj", heads * keys, sizes.query_rank)]
    for name, rows, columns in (
        *queries,
        ("kv_a_proj_with_mqa", sizes.rank + sizes.rope_dim, hidden),
        ("kv_b_proj", heads * (sizes.plain_dim + sizes.value_dim), sizes.rank),
        ("o_proj", hidden, heads * sizes.value_dim),
    ):
        yield Matrix(name=f"self_attn.{name}", out_features=rows, in_features=columns)
    if sizes.index_dim:
        rows = sizes.index_heads * sizes.index_dim
        yield Matrix(name=f"{_INDEXER}.wq_b", out_features=rows, in_features=sizes.query_rank or hidden)
        yield Matrix(name=f"{_INDEXER}.wk", out_features=sizes.index_dim, in_features=hidden)
        name = f"{_INDEXER}.weights_proj"
        yield Matrix(name=name, out_features=sizes.index_heads, in_features=hidden, quantizable=False)


def _latent_norms(sizes: LatentShape) -> Shapes:
    norms: Shapes = {"self_attn.kv_a_layernorm.weight": (sizes.rank,)}
    if sizes.query_rank:
        norms["self_attn.q_a_layernorm.weight"] = (sizes.query_rank,)
    if sizes.index_dim:  # a layer norm
        norms |= {f"{_INDEXER}.k_norm.{part}": (sizes.index_dim,) for part in ("weight", "bias")}
    return norms


def _mlp(
    model: ModelDescription, up: Sequence[str], down: str, width: int, *, gated: bool = True, **facts: Any
) -> list[Matrix]:
    """Return the linears of an MLP; `facts` are further fields of each `Matrix`, e.g. bias or copies."""
    rows = 2 * width if gated and len(up) == 1 else width
    sizes = [*((name, rows, model.hidden_size) for name in up), (down, model.hidden_size, width)]
    return [Matrix(name=name, out_features=n, in_features=k, **facts) for name, n, k in sizes]


def _mixture(model: ModelDescription) -> list[Matrix]:
    data, sizes, hidden = model.family.experts, model.experts, model.hidden_size
    assert data is not None and sizes is not None
    count, active = sizes.num_experts, sizes.num_chosen
    facts = {"bias": data.bias, "copies": count, "active": active}
    matrices = _mlp(model, data.up, data.down, sizes.width, gated=data.gated, **facts)
    matrices.append(Matrix(name=data.router, out_features=count, in_features=hidden, quantizable=False, bias=data.bias))
    if sizes.shared_width is not None and data.shared_down is not None:
        bias = model.entries.flag(model.family.biases.mlp)
        matrices += _mlp(model, data.shared_up, data.shared_down, sizes.shared_width, bias=bias, gated=data.gated)
    if data.shared_gate is not None:
        matrices.append(Matrix(name=data.shared_gate, out_features=1, in_features=hidden, quantizable=False))
    return matrices
