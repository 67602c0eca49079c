"""Config of one model: the model's description and all constants of its forward pass, checked, with defaults filled in.

This module reads plain JSON as written by transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`),
without importing transformers. `models.description` derives the tensors from the config.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.errors import ModelError
from quantkit.kernels.reference.ops import ACTIVATIONS, CLAMPED_SWIGLU, LIMITED_SWIGLU, XIELU
from quantkit.models.config import ConfigReader, NotNative, positions_by_layer
from quantkit.models.description import ModelDescription, description_fields
from quantkit.models.family import Family
from quantkit.models.recurrent import Recurrent
from quantkit.models.rope import RopeConfig, read_rope
from quantkit.safety.untrusted import shorten

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(ModelDescription):
    """Description of one model, with the constants of its forward pass.

    Args:
        ropes: rotary embedding of each layer; None = no positions.
        norm_eps, norm_offset: epsilon of all norms, and the number to add to their weights.
        activation: activation of the MLP.
        attention_scale: factor by which the products of queries and keys are multiplied.
        attention_softcap, logits_softcap: c in the cap c * tanh(x / c) on attention scores, and on logits; None = no
            cap.
        clip: bound on the absolute value of queries, keys and values; None = no bound.
        embedding_scale, residual_scale, logits_scale: factors on the embeddings, on additions to the residual stream,
            and on the logits.
        max_length: the maximum number of tokens per sequence that the model supports.
    """

    ropes: tuple[RopeConfig | None, ...]
    norm_eps: float
    norm_offset: float
    activation: str
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    clip: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    max_length: int


def read_config(config: Mapping[str, Any], family: Family) -> ModelConfig:
    """Read and check a model's config.json.

    Args:
        config: contents of config.json.
        family: the model's family.
    Raises:
        ModelError: a key is missing, has the wrong type, contradicts another, or asks for something quantkit cannot
            compute.
    """
    if not family.native:
        raise NotNative(f"architecture {next(iter(family.hf_names), config.get('model_type'))!r}")
    read = ConfigReader(config, family.defaults, family.keys)
    for key in family.not_native:
        if read.flag(key):
            raise NotNative(f"{key} = {config.get(key)!r}")
    fields = description_fields(read, family)
    factors, length = family.multipliers, read.count("max_position_embeddings")
    activation = family.activation or read.text("hidden_activation", default="silu")
    if activation not in (*ACTIVATIONS, CLAMPED_SWIGLU, LIMITED_SWIGLU, XIELU):
        raise NotNative(f"activation {activation!r}")
    if family.recurrent is not None:
        _check_recurrent(read, family.recurrent)
    latent = fields["latent"]
    ropes = _read_ropes(read, family, fields["windows"], latent.rope_dim if latent else fields["head_dim"], length)
    root = read.positive(factors.attention_root, default=fields["head_dim"])
    if latent and (latent.index_dim or any(fields["windows"])):
        raise NotNative("latent attention with an indexer or a window")
    # Latent attention with scaled wavelengths has sharper scores.
    sharpening = ropes[0].sharpening if latent and ropes[0] else 1.0
    scale = fields["hidden_size"] ** 0.5 if factors.root_embedding else read.number(factors.embedding, default=1.0)
    return ModelConfig(
        **fields,
        ropes=ropes,
        norm_eps=read.number("rms_norm_eps", default=1e-6),
        norm_offset=family.norm_offset,
        activation=activation,
        attention_scale=read.number(factors.attention, default=root**-0.5 * sharpening),
        attention_softcap=read.optional_number(factors.attention_softcap),
        logits_softcap=read.optional_number(factors.logits_softcap),
        clip=read.optional_number(factors.clip),
        embedding_scale=scale,
        residual_scale=read.number(factors.residual, default=1.0),
        logits_scale=read.number(factors.logits, default=1.0) / read.positive(factors.logits_divisor, default=1.0),
        max_length=_max_length(ropes, length),
    )


def _check_recurrent(read: ConfigReader, data: Recurrent) -> None:
    if read.text(data.activation, default="silu") not in ("silu", "swish"):
        raise NotNative(f"activation {read.get(data.activation)!r} of recurrent layers")
    # JSON has no infinity: transformers writes an object.
    limits = read.get("time_step_limit") or [0.0]
    if not isinstance(limits, list):
        raise ModelError(f"config.json: time_step_limit is {shorten(limits)}, not a list of two numbers; correct it")
    if limits[0] != 0.0 or any(isinstance(limit, (int, float)) and math.isfinite(limit) for limit in limits[1:]):
        raise NotNative(f"time_step_limit = {limits}")


def _read_ropes(
    read: ConfigReader, family: Family, windows: tuple[int | None, ...], head_dim: int, length: int
) -> tuple[RopeConfig | None, ...]:
    ropes = {local: read_rope(read, family.rope, head_dim, length, local) for local in (False, True)}
    rotated = positions_by_layer(read, family, windows)
    return tuple(ropes[w is not None] if rotates else None for w, rotates in zip(windows, rotated, strict=True))


def _max_length(ropes: Iterable[RopeConfig | None], length: int) -> int:
    """Return the maximum number of tokens per sequence: config.json's value times the factor of dynamic scaling."""
    return int(length * max((rope.factor for rope in ropes if rope and rope.kind == "dynamic"), default=1.0))
