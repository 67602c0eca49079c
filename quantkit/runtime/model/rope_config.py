"""The rotary embedding that a config.json asks for, in the words of transformers 4 or 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from quantkit.errors import ModelError
from quantkit.models.family import Rope
from quantkit.runtime.model.rope import Kind, RopeConfig
from quantkit.runtime.model.settings import NotNative, Settings

_BY_LAYER_TYPE = ("full_attention", "sliding_attention")
_OTHER_NAMES = {"su": "longrope", "none": "default"}


def read_rope(config: Settings, family: Rope, head_dim: int, length: int, local: bool) -> RopeConfig:
    """Rotary embedding of layers with (`local`) or without a sliding window.

    Args:
        config: entries of config.json.
        family: what holds where it says nothing.
        head_dim: channels of a head.
        length: `max_position_embeddings`.
        local: whether the layers have a window.
    Raises:
        ModelError: an unknown kind, or an entry of it is missing or wrong.
    """
    entries = _entries(config, family, local)
    read = Settings(entries, {}, "config.json, RoPE")
    theta = read.number("rope_theta", default=_outer_theta(config, family, local))
    partial = read.number(
        "partial_rotary_factor",
        default=config.number("partial_rotary_factor", "rotary_pct", default=family.partial),
    )
    width = int(head_dim * partial)
    if width < 2 or width % 2 or width > head_dim:
        raise ModelError(f"config.json: {width} of {head_dim} channels of a head would be rotated; must be even, >= 2")
    kind = read.text("rope_type", "type", default="default")
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in get_args(Kind):
        raise NotNative(f"rope_type {kind!r} (there are: {', '.join(get_args(Kind))})")
    settings = _scaling(kind, read, config, width, length)
    return RopeConfig(
        kind=kind,  # type: ignore[arg-type]  # just checked
        theta=theta,
        width=width,
        interleaved=family.interleaved,
        max_length=length,
        **settings,
    )


def _entries(config: Settings, family: Rope, local: bool) -> Mapping[str, Any]:
    """The dictionary of RoPE entries for these layers; empty where there is none."""
    found = config.get("rope_scaling", "rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: RoPE entries are a {type(found).__name__}, not an object; mend it")
    if any(isinstance(found.get(kind), Mapping) for kind in _BY_LAYER_TYPE):
        return found.get(_BY_LAYER_TYPE[local]) or {}
    if local and family.local_theta is not None:
        return {}  # what is scaled is only the other layers
    return found


def _outer_theta(config: Settings, family: Rope, local: bool) -> float:
    """The base of the wavelengths, where the RoPE entries do not have it."""
    if local and family.local_theta is not None:
        return config.number("rope_local_base_freq", default=family.local_theta)
    return config.number("rope_theta", "rotary_emb_base", default=family.theta)


def _scaling(kind: str, read: Settings, config: Settings, width: int, length: int) -> dict[str, Any]:
    """The entries that belong to this kind of scaling."""
    if kind in ("linear", "dynamic"):
        return {"factor": _factor(read)}
    if kind not in ("yarn", "llama3", "longrope"):
        return {}
    original = read.count("original_max_position_embeddings", default=length)
    original = config.count("original_max_position_embeddings", default=original)
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if high <= low:
            raise ModelError(f"config.json, RoPE: high_freq_factor {high} must exceed low_freq_factor {low}")
        return {
            "factor": _factor(read),
            "original_length": original,
            "low_frequency_factor": low,
            "high_frequency_factor": high,
        }
    factor = read.number("factor", default=length / original)
    if kind == "yarn":
        return {
            "factor": factor,
            "original_length": original,
            "attention_factor": _yarn_attention(read, factor),
            "beta_fast": read.number("beta_fast", default=32.0),
            "beta_slow": read.number("beta_slow", default=1.0),
            "truncate": read.flag("truncate", True),
        }
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "original_length": original,
        "attention_factor": read.number("attention_factor", default=grown),
        "short_factors": read.numbers("short_factor", width // 2),
        "long_factors": read.numbers("long_factor", width // 2),
    }


def _factor(read: Settings) -> float:
    factor = read.number("factor")
    if factor < 1:
        raise ModelError(f"config.json, RoPE: factor {factor} is below 1; contexts can only grow")
    return factor


def _yarn_attention(read: Settings, factor: float) -> float:
    """YaRN's factor of cosine and sine: given, or from the growth of the context."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, everywhere = read.optional_number("mscale"), read.optional_number("mscale_all_dim")
    ratio = scale(own) / scale(everywhere) if own and everywhere else scale(1.0)
    return read.number("attention_factor", default=ratio)
