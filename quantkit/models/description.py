"""One model: its config.json in the light of its family, as layers, tensor names and shapes, and cache geometry.

Torch-free and without files. The runtime builds from it, planning counts it, GGUF export names it. What a layer
computes beyond its tensors (rotations, scales, activations) is the runtime's `ModelConfig`, which is this and more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.errors import ModelError
from quantkit.models.config import ConfigReader
from quantkit.models.family import Experts, Family
from quantkit.models.layer_state_sizes import NOTHING, AttentionShape, StateShape
from quantkit.models.layer_tensors import layer_tensors
from quantkit.models.layer_types import experts_by_layer, halves_by_layer, recurrent_by_layer, windows_by_layer
from quantkit.models.tensors import LayerTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape:
    """A mixture of experts.

    Args:
        num_experts: of a layer.
        num_chosen: experts of each token.
        width: of an expert.
        normalize: whether the scores of the chosen are made to sum to one.
        shared_width: of the experts that see every token, as one; None = there are none.
        scoring: what makes scores of router logits.
        num_groups, chosen_groups: experts are chosen from the best groups only.
        group_rule: a group is as good as its best expert, or as the sum of its best two.
        scale: of the scores of the chosen.
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
        """Whether experts are chosen by a softmax alone."""
        return self.scoring == "softmax" and self.num_groups == 1 and self.scale == 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Multi-head latent attention, with the indexer of DeepSeek-V3.2 where it has one.

    Args:
        rank, query_rank: of the narrow tensors of keys and values, and of queries; query_rank 0 = there is none.
        rope_dim, plain_dim: channels of a head's query and key with and without rotation.
        value_dim: channels of a head's value.
        index_dim, index_heads, top_k: of the indexer; index_dim 0 = there is none.
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
    """One model.

    Args:
        family: what it is one of.
        entries: of its config.json.
        vocab_size, hidden_size: of the vocabulary, the residual stream.
        num_heads, num_kv_heads, head_dim: of attention.
        windows: of each layer: a token attends to this many tokens, itself included; None = to all before it.
        recurrent: of each layer: it keeps a state in place of keys and values.
        only_mlp: of each layer: it is an MLP and nothing else; where each is one half, the others have none.
        with_experts: of each layer: experts in place of the MLP.
        qk_norm: whether queries and keys are normed.
        parallel: attention and MLP read the same residual stream.
        experts: None = every layer has an MLP.
        latent: None = ordinary attention.
        tied: the head is the embedding.
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
        """Width of the MLP."""
        ratio = self.family.mlp_ratio
        return self.entries.count("intermediate_size", default=None if ratio is None else ratio * self.hidden_size)

    @property
    def is_recurrent(self) -> bool:
        """Whether there are layers that keep a state, in place of all keys and values or beside entries."""
        return any(self.recurrent) or self.family.block is not None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    def tensors(self, index: int) -> LayerTensors:
        """Names and shapes of what one layer holds; names are relative to it."""
        return layer_tensors(self, index)

    def attention(self, index: int) -> AttentionShape | StateShape:
        """Return what one layer keeps of each token, or of each sequence, and reads."""
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
    """A model's config.json, the sizes in it checked.

    Args:
        config: its contents; those of a language model inside a multimodal wrapper count.
        family: the one it is of.
        where: what to call the file in messages.
    Raises:
        ModelError: a key is missing, of the wrong kind, or contradicts another.
    """
    return ModelDescription(**description_fields(ConfigReader(config, family.defaults, family.keys, where), family))


def description_fields(read: ConfigReader, family: Family) -> dict[str, Any]:
    """The fields of a `ModelDescription`, for itself and for what extends it."""
    vocabulary, hidden, heads = (read.count(key) for key in ("vocab_size", "hidden_size", "num_attention_heads"))
    # Rows that take turns head by head give each query head a key and a value of its own.
    kv_heads = heads if family.parts.qkv_by_head else read.count("num_key_value_heads", default=heads)
    latent = None if read.get("kv_lora_rank") is None or family.block else _latent(read)
    if family.multi_query is not None and read.flag(family.multi_query):
        kv_heads = 1
    if latent is None and read.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{read.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no "
            "head_dim; mend it"
        )
    if heads % kv_heads:
        raise ModelError(
            f"{read.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; mend it"
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
        raise ModelError(f"{read.where}: num_experts_per_tok {chosen} exceeds the {count} experts; mend it")
    width, shared = read.count(data.width, default=read.get("intermediate_size")), None
    if data.shared_up:
        key = data.shared_width
        shared = read.count(key, at_least=0) if key else width * read.count("n_shared_experts", default=0, at_least=0)
    return ExpertsShape(
        num_experts=count,
        num_chosen=chosen,
        width=width,
        normalize=read.flag(data.normalize, True),
        # A model without shared experts may say 0 as well as nothing.
        shared_width=shared or None,
        scoring=data.scoring,
        **_groups(read, data, count, chosen),
        scale=read.number(data.scale, default=1.0),
    )


def _groups(read: ConfigReader, data: Experts, count: int, chosen: int) -> dict[str, Any]:
    """Return the number of groups of experts, and the number of groups that experts are chosen from."""
    groups = read.count("n_group", default=1) if data.groups and read.get("topk_method") != "greedy" else 1
    kept = read.count("topk_group", default=1) if groups > 1 else 1
    if count % groups or kept > groups or kept * (count // groups) < chosen:
        raise ModelError(
            f"{read.where}: {chosen} experts of each token cannot come from topk_group {kept} of n_group {groups} with "
            f"{count} experts in all; mend it"
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
