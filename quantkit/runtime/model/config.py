"""What one model computes: its config.json read in the light of its family, checked, with every default filled in.

Plain JSON is read, both as transformers 4 wrote it (`rope_theta`, `rope_scaling`) and as version 5 does
(`rope_parameters`); transformers itself is not needed. Which tensors that makes is the business of `manifest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.errors import ModelError
from quantkit.kernels.reference import ACTIVATIONS
from quantkit.models.families import Family
from quantkit.runtime.model.rope import RopeConfig
from quantkit.runtime.model.rope_config import read_rope
from quantkit.runtime.model.settings import NotNative, Settings

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """What differs from layer to layer.

    Args:
        window: a token attends to this many tokens, itself included; None = to all before it.
        rope: its rotary embedding; None = no positions.
        has_experts: experts in place of the MLP.
    """

    window: int | None
    rope: RopeConfig | None
    has_experts: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """A mixture of experts.

    Args:
        num_experts: of a layer.
        num_chosen: experts of each token.
        width: of an expert.
        normalize: whether the scores of the chosen are made to sum to one.
        shared_width: of the expert that sees every token; None = there is none.
    """

    num_experts: int
    num_chosen: int
    width: int
    normalize: bool
    shared_width: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model, ready to be built.

    Args:
        family: its family.
        vocab_size, hidden_size, width: of the vocabulary, the residual stream, the MLP.
        num_heads, num_kv_heads, head_dim: of attention.
        layers: in running order.
        norm_eps, norm_offset: of all norms.
        qk_norm: whether queries and keys are normed.
        parallel: attention and MLP read the same residual stream.
        activation: of the MLP.
        attention_scale: of query times key.
        attention_softcap, logits_softcap: c of c * tanh(x / c).
        embedding_scale, residual_scale, logits_scale: of the embeddings, of what joins the stream, of the logits.
        experts: None = every layer has an MLP.
        tied: the head is the embedding.
        max_length: tokens of a sequence.
        dtype: of the checkpoint, where config.json says so.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    norm_offset: float
    qk_norm: bool
    parallel: bool
    activation: str
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    experts: ExpertsConfig | None
    tied: bool
    max_length: int
    dtype: torch.dtype | None


def read_config(config: Mapping[str, Any], family: Family) -> ModelConfig:
    """A model's config.json, checked.

    Args:
        config: its contents.
        family: the family it is of.
    Raises:
        ModelError: a key is missing, of the wrong kind, contradicts another, or asks for what is not computed here.
    """
    read = Settings(config, family.defaults)
    for key in family.not_native:
        if read.flag(key, False):
            raise NotNative(f"{key} = {config.get(key)!r}")
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = heads if family.parts.qkv_by_head else read.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; mend it"
        )
    if read.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no "
            "head_dim; mend it"
        )
    head_dim = read.count("head_dim", default=hidden // heads)
    factors = family.multipliers
    length = read.count("max_position_embeddings")
    activation = family.activation or read.text("hidden_activation", "hidden_act", default="silu")
    if activation not in ACTIVATIONS:
        raise NotNative(f"activation {activation!r}")
    layers = _read_layers(read, family, head_dim, length)
    return ModelConfig(
        family=family,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        width=read.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        norm_eps=read.number("rms_norm_eps", "layer_norm_eps", "norm_epsilon", default=1e-6),
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm is not None and read.flag(family.qk_norm.switch, True),
        parallel=read.flag(family.parallel, False),
        activation=activation,
        attention_scale=_attention_scale(read, family, head_dim),
        attention_softcap=read.optional_number(factors.attention_softcap),
        logits_softcap=read.optional_number(factors.logits_softcap),
        embedding_scale=hidden**0.5 if factors.root_embedding else read.number(factors.embedding, default=1.0),
        residual_scale=read.number(factors.residual, default=1.0),
        logits_scale=read.number(factors.logits, default=1.0) / read.number(factors.logits_divisor, default=1.0),
        experts=_read_experts(read, family) if any(layer.has_experts for layer in layers) else None,
        tied=read.flag("tie_word_embeddings", False),
        max_length=_max_length(layers, length),
        dtype=DTYPES.get(str(read.get("dtype") or read.get("torch_dtype")).removeprefix("torch.")),
    )


def _attention_scale(read: Settings, family: Family, head_dim: int) -> float:
    factors = family.multipliers
    if factors.attention is not None:
        return read.number(factors.attention)
    return float(read.number(factors.attention_root, default=head_dim) ** -0.5)


def _read_layers(read: Settings, family: Family, head_dim: int, length: int) -> tuple[LayerConfig, ...]:
    count = read.count("num_hidden_layers")
    windows = _windows(read, family, count)
    sparse = _with_experts(read, family, count)
    rotated = _rotated(read, family, windows)
    ropes = {local: read_rope(read, family.rope, head_dim, length, local) for local in (False, True)}
    return tuple(
        LayerConfig(
            window=windows[i], rope=ropes[windows[i] is not None] if rotated[i] else None, has_experts=sparse[i]
        )
        for i in range(count)
    )


def _windows(read: Settings, family: Family, count: int) -> list[int | None]:
    """Sliding window of each layer."""
    rule = family.window
    if rule is None or not read.flag(rule.switch, True) or not read.get("sliding_window"):
        return [None] * count
    size, types = read.count("sliding_window"), read.get("layer_types")
    if types is not None and rule.rule != "all":
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != count or not set(types) <= set(known):
            raise ModelError(
                f"config.json: layer_types must name one of {', '.join(known)} for each of the {count} layers"
            )
        chosen = [kind == known[1] for kind in types]
    elif rule.rule == "pattern":
        pattern = read.count("sliding_window_pattern", "_sliding_window_pattern", default=rule.pattern)
        chosen = [(i + 1) % pattern != 0 for i in range(count)]
    elif rule.rule in ("upper", "even_lower"):
        bound = read.count("max_window_layers", at_least=0)
        chosen = [i >= bound if rule.rule == "upper" else i < bound and i % 2 == 0 for i in range(count)]
    else:
        chosen = [rule.rule == "all"] * count
    return [size if yes else None for yes in chosen]


def _rotated(read: Settings, family: Family, windows: list[int | None]) -> list[bool]:
    """Whether each layer has positions."""
    count = len(windows)
    if family.rope.layers == "window":
        return [window is not None for window in windows]
    if family.rope.layers == "all":
        return [True] * count
    listed = read.get("no_rope_layers")
    if listed is None:
        interval = read.count("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count:
        raise ModelError(f"config.json: no_rope_layers must be a list of 0 or 1 for each of the {count} layers")
    return [bool(item) for item in listed]


def _with_experts(read: Settings, family: Family, count: int) -> list[bool]:
    """Whether each layer has experts in place of the MLP."""
    if family.experts is None:
        return [False] * count
    step, dense = read.count("decoder_sparse_step", default=1), read.get("mlp_only_layers") or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def _read_experts(read: Settings, family: Family) -> ExpertsConfig:
    data = family.experts
    assert data is not None
    count, chosen = read.count("num_local_experts", "num_experts"), read.count("num_experts_per_tok")
    if chosen > count:
        raise ModelError(f"config.json: num_experts_per_tok {chosen} exceeds the {count} experts; mend it")
    return ExpertsConfig(
        num_experts=count,
        num_chosen=chosen,
        width=read.count(data.width),
        normalize=read.flag(data.normalize, True),
        shared_width=None if data.shared_width is None else read.count(data.shared_width),
    )


def _max_length(layers: tuple[LayerConfig, ...], length: int) -> int:
    """Tokens of a sequence: what config.json says, but dynamic scaling only begins where that ends."""
    stretch = max((layer.rope.factor for layer in layers if layer.rope and layer.rope.kind == "dynamic"), default=1.0)
    return int(length * stretch)
