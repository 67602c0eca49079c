"""Describe a model from its config.json and family: layers, tensor names and shapes, and cache shapes.

This module needs no torch and reads no files. The runtime, planning and the GGUF export use `ModelDescription`. The
runtime's `ModelConfig` extends it with the computations of a layer (rotations, scales, activations).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.errors import ModelError
from quantkit.models.config import (
    ConfigReader,
    experts_by_layer,
    halves_by_layer,
    recurrent_by_layer,
    windows_by_layer,
)
from quantkit.models.family import Experts, Family
from quantkit.models.layer_state_sizes import NOTHING, AttentionShape, StateShape
from quantkit.models.layer_tensors import LayerTensors, layer_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape:
    """Sizes and routing of a mixture of experts.

    Args:
        num_experts: experts per layer.
        num_chosen: experts per token.
        width: intermediate size of an expert.
        normalize: whether the scores of the chosen experts are normalized to sum to 1.
        shared_width: total intermediate size of the shared experts; None = no shared experts.
        scoring: function that converts router logits to scores.
        num_groups, chosen_groups: number of expert groups, and number of best groups from which experts are chosen.
        group_rule: how a group is scored: by its best expert ("best") or by the sum of its two best scores ("two").
        scale: factor on the scores of the chosen experts.
    """

    num_experts: int
    num_chosen: int
    width: int
    normalize: bool
    shared_width: int | None
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    num_groups: int = 1
    chosen_groups: int = 1
    group_rule: Literal["best", "two"] = "two"
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether a plain softmax chooses the experts, without groups or scale."""
        return self.scoring == "softmax" and self.num_groups == 1 and self.scale == 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Sizes of multi-head latent attention, optionally with the indexer of DeepSeek-V3.2.

    Args:
        rank: rank of the low-rank projection of keys and values.
        query_rank: rank of the low-rank projection of queries; 0 = queries are projected directly.
        rope_dim, plain_dim: numbers of rotated and of unrotated channels of a head's query and key.
        value_dim: channels of a head's value.
        index_dim, index_heads, top_k: channels and heads of the indexer, and entries that it selects; index_dim 0 = no
            indexer.
    """

    rank: int
    query_rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    index_dim: int
    index_heads: int
    top_k: int

    @property
    def head_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.plain_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """Description of one model.

    Args:
        family: family of the model.
        entries: entries of the model's config.json.
        vocab_size, hidden_size: sizes of the vocabulary and of the residual stream.
        num_heads, num_kv_heads, head_dim: query heads, key/value heads and channels per head.
        windows: per layer, the number of tokens that a token attends to, including itself; None = no window.
        recurrent: per layer, whether the layer keeps a state instead of keys and values.
        only_mlp: per layer, whether the layer has no attention, only an MLP or experts; see `Family.one_half`.
        with_experts: per layer, whether the layer has experts instead of an MLP.
        qk_norm: whether queries and keys are normalized.
        parallel: whether attention and MLP read the same residual stream.
        experts: sizes and routing of experts; None = every layer has an MLP.
        latent: sizes of latent attention; None = ordinary attention.
        tied: whether the output head shares the embedding's weight.
    """

    family: Family
    entries: ConfigReader = field(compare=False, repr=False)
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    recurrent: tuple[bool, ...]
    only_mlp: tuple[bool, ...]
    with_experts: tuple[bool, ...]
    qk_norm: bool
    parallel: bool
    experts: ExpertsShape | None
    latent: LatentShape | None
    tied: bool

    @property
    def width(self) -> int:
        """Intermediate size of the MLP."""
        ratio = self.family.mlp_ratio
        return self.entries.count("intermediate_size", default=None if ratio is None else ratio * self.hidden_size)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps a state, instead of keys and values or in addition to cache entries."""
        return any(self.recurrent) or self.family.block is not None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    def tensors(self, index: int) -> LayerTensors:
        """Return the names (relative to the layer) and shapes of one layer's tensors."""
        return layer_tensors(self, index)

    def attention(self, index: int) -> AttentionShape | StateShape:
        """Return the shape of one layer's cache per token, or of its state per sequence."""
        if self.family.recurrent is not None and self.recurrent[index]:
            return self.family.recurrent.shape(self.entries)
        if self.only_mlp[index]:
            return NOTHING
        if self.family.block is not None:
            return self.family.block(self.entries, index).attention
        sizes = self.latent
        if sizes is None:
            return AttentionShape(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                key_dim=self.head_dim,
                value_dim=self.head_dim,
                window=self.windows[index],
            )
        return AttentionShape(
            num_heads=self.num_heads,
            key_dim=sizes.rank + sizes.rope_dim,
            rope_dim=sizes.rope_dim,
            top_k=sizes.top_k if sizes.index_dim else None,
            index_dim=sizes.index_dim,
            index_heads=sizes.index_heads if sizes.index_dim else 0,
            full_dims=(sizes.plain_dim + sizes.rope_dim, sizes.value_dim),
        )


def describe(config: Mapping[str, Any], family: Family, where: str = "config.json") -> ModelDescription:
    """Describe a model from its config.json and check the sizes in it.

    Args:
        config: contents of config.json; for a multimodal wrapper, the language model in it is described.
        family: family of the model.
        where: name of the file in messages.
    Raises:
        ModelError: a key is missing, has the wrong type, or contradicts a different key.
    """
    return ModelDescription(**description_fields(ConfigReader(config, family.defaults, family.keys, where), family))


def description_fields(read: ConfigReader, family: Family) -> dict[str, Any]:
    """Return the fields of a `ModelDescription`, to which subclasses add their own fields."""
    vocabulary, hidden, heads = (read.count(key) for key in ("vocab_size", "hidden_size", "num_attention_heads"))
    # If the rows of q, k and v are ordered by head, each query head has its own key and value.
    kv_heads = heads if family.parts.qkv_by_head else read.count("num_key_value_heads", default=heads)
    latent = None if read.get("kv_lora_rank") is None or family.block else _latent(read)
    if family.multi_query is not None and read.flag(family.multi_query):
        kv_heads = 1
    if latent is None and read.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{read.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; correct them, or "
            "add head_dim"
        )
    if heads % kv_heads:
        raise ModelError(
            f"{read.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "correct them"
        )
    windows, sparse = windows_by_layer(read, family), experts_by_layer(read, family)
    return {
        "family": family,
        "entries": read,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": latent.head_dim if latent else read.count("head_dim", default=hidden // heads),
        "windows": windows,
        "recurrent": recurrent_by_layer(read, family),
        "only_mlp": halves_by_layer(read, family),
        "with_experts": sparse,
        "qk_norm": family.qk_norm is not None and read.flag(family.qk_norm.switch, family.qk_norm.switch is None),
        "parallel": read.flag(family.parallel),
        "experts": _experts(read, family.experts) if family.experts is not None and any(sparse) else None,
        "latent": latent,
        "tied": read.flag("tie_word_embeddings"),
    }


def _experts(read: ConfigReader, data: Experts) -> ExpertsShape:
    count, chosen = read.count("num_experts"), read.count("num_experts_per_tok")
    if chosen > count:
        raise ModelError(f"{read.where}: num_experts_per_tok {chosen} exceeds the {count} experts; correct it")
    width, shared = read.count(data.width, default=read.get("intermediate_size")), None
    if data.shared_up:
        key = data.shared_width
        shared = read.count(key, at_least=0) if key else width * read.count("n_shared_experts", default=0, at_least=0)
    return ExpertsShape(
        num_experts=count,
        num_chosen=chosen,
        width=width,
        normalize=read.flag(data.normalize, True),
        # Without shared experts, the entry may be 0 or missing.
        shared_width=shared or None,
        scoring=data.scoring,
        **_groups(read, data, count, chosen),
        scale=read.number(data.scale, default=1.0),
    )


def _groups(read: ConfigReader, data: Experts, count: int, chosen: int) -> dict[str, Any]:
    """Return the fields of `ExpertsShape` that describe groups of experts."""
    groups = read.count("n_group", default=1) if data.groups and read.get("topk_method") != "greedy" else 1
    kept = read.count("topk_group", default=1) if groups > 1 else 1
    if count % groups or kept > groups or kept * (count // groups) < chosen:
        raise ModelError(
            f"{read.where}: cannot choose {chosen} experts per token from {kept} of {groups} groups with {count} "
            "experts in total; correct num_experts_per_tok, topk_group or n_group"
        )
    return {"num_groups": groups, "chosen_groups": kept, "group_rule": data.groups or "two"}


def _latent(read: ConfigReader) -> LatentShape:
    return LatentShape(
        rank=read.count("kv_lora_rank"),
        query_rank=read.optional_count("q_lora_rank") or 0,
        rope_dim=read.count("qk_rope_head_dim"),
        plain_dim=read.count("qk_nope_head_dim"),
        value_dim=read.count("v_head_dim"),
        index_dim=read.count("index_head_dim", default=0, at_least=0),
        index_heads=read.count("index_n_heads", default=64, at_least=0),
        top_k=read.count("index_topk", default=2048, at_least=0),
    )
