"""Read the rotary embedding of a model from config.json, in the format of transformers 4 or 5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quantkit.errors import ModelError
from quantkit.models.config import ConfigReader, NotNative
from quantkit.models.family import Rope

# The first configs of Phi-3 call LongRoPE `su`.
_OTHER_NAMES = {"su": "longrope", "none": "default"}
_LARGEST_FACTOR = 10**6  # on the context length; far above any real factor


Kind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of some layers.

    Args:
        kind: method of scaling the wavelengths.
        theta: base of the wavelengths.
        width: number of rotated channels per head, R; even.
        interleaved: whether channels 2i and 2i+1 form a rotated pair, instead of i and i + R/2.
        max_length: longest sequence that config.json allows, `max_position_embeddings`.
        factor: factor by which the context length is extended.
        original_length: context length of pretraining (yarn, llama3, longrope).
        attention_factor: factor on cosine and sine (yarn, longrope).
        beta_fast, beta_slow: bounds of YaRN's ramp, in rotations over the original length.
        truncate: whether YaRN rounds these bounds to whole channels.
        low_frequency_factor, high_frequency_factor: bounds of Llama 3's ramp.
        sharpening: factor on the softmax scale of latent attention (yarn).
        growth: growth of queries with position, see `family.Rope`; 0 = none.
        short_factors, long_factors: LongRoPE's R/2 factors, one per wavelength: for sequences up to the original
            length, and for longer ones.
    """

    kind: Kind = "default"
    theta: float
    width: int
    interleaved: bool = False
    max_length: int
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    sharpening: float = 1.0
    growth: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def turning_length(self) -> int | None:
        """Sequence length above which the wavelengths depend on the length; None = they never do."""
        return {"dynamic": self.max_length, "longrope": self.original_length}.get(self.kind)


def read_rope(config: ConfigReader, family: Rope, head_dim: int, length: int, local: bool) -> RopeConfig:
    """Read the rotary embedding of the layers with a sliding window (`local`), or of the layers without one.

    Args:
        config: entries of config.json.
        family: the family's defaults.
        head_dim: channels per head.
        length: `max_position_embeddings`.
        local: whether the layers have a sliding window.
    Raises:
        ModelError: the kind is not supported, or one of its entries is missing or wrong.
    """
    entries = _entries(config, family, local)
    read = ConfigReader(entries, where=f"{config.where}, RoPE")
    theta = read.number("rope_theta", default=_outer_theta(config, family, local))
    partial = read.number(
        "partial_rotary_factor", default=config.number("partial_rotary_factor", default=family.partial)
    )
    if theta <= 0:
        raise ModelError(f"config.json: rope_theta is {theta}, but must be above 0; correct it")
    if not 0 <= partial <= 1:
        raise ModelError(f"config.json: partial_rotary_factor is {partial}, but must be from 0 to 1; correct it")
    width = int(head_dim * partial)
    if family.width is not None and read.get("partial_rotary_factor") is None:
        width = config.count(family.width, default=width)
    if width < 2 or width % 2 or width > head_dim:
        raise ModelError(
            f"config.json: {width} channels of each head are rotated; the number must be even and from 2 to head_dim "
            f"({head_dim}); correct partial_rotary_factor or head_dim"
        )
    kind = read.text("rope_type", default="default")
    kind = _OTHER_NAMES.get(kind, kind)
    if family.fixed_alpha and kind == "dynamic" and read.get("alpha") is not None:
        kind, theta = "default", theta * _alpha(read) ** (width / max(1, width - 2))
    if kind not in get_args(Kind):
        raise NotNative(f"rope_type {kind!r} (not one of {', '.join(get_args(Kind))})")
    settings = _scaling(kind, read, config, width, length)
    if kind == "yarn" and family.attention_factor is not None:
        settings["attention_factor"] = read.number("attention_factor", default=family.attention_factor)
    if family.grows and read.get("llama_4_scaling_beta"):
        settings["growth"] = read.number("llama_4_scaling_beta")
        settings["original_length"] = read.count("original_max_position_embeddings")
    return RopeConfig(
        kind=kind,  # type: ignore[arg-type]  # just checked
        theta=theta,
        width=width,
        interleaved=config.flag(family.interleaved, True),
        max_length=length,
        **settings,
    )


def _entries(config: ConfigReader, family: Rope, local: bool) -> Mapping[str, Any]:
    """Return the RoPE entries of the layers with a window (`local`) or without; empty if config.json has none."""
    settings = config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise ModelError(
            f"config.json: the RoPE entries are a {type(settings).__name__}, not a JSON object; correct "
            "rope_parameters or rope_scaling"
        )
    if any(isinstance(settings.get(kind), Mapping) for kind in family.by_layer):
        settings = settings.get(family.by_layer[local]) or {}
        if not isinstance(settings, Mapping):
            raise ModelError(
                f"config.json: the RoPE entries of {family.by_layer[local]} are a {type(settings).__name__}, not a "
                "JSON object; correct them"
            )
        return settings
    if local and (family.local_theta is not None or not family.local_scaled):
        return {}  # the entries apply only to layers without a window
    return settings


def _outer_theta(config: ConfigReader, family: Rope, local: bool) -> float:
    """Return the base of the wavelengths that applies if the RoPE entries do not give it."""
    if local and family.local_theta is not None:
        return config.number("rope_local_base_freq", default=family.local_theta)
    if not local and family.theta_key is not None:
        return config.number(family.theta_key)
    return config.number("rope_theta", default=family.theta)


def _scaling(kind: str, read: ConfigReader, config: ConfigReader, width: int, length: int) -> dict[str, Any]:
    """Return the fields of `RopeConfig` that belong to this kind of scaling."""
    if kind in ("linear", "dynamic"):
        return {"factor": _factor(read)}
    if kind not in ("yarn", "llama3", "longrope"):
        return {}
    original = read.count("original_max_position_embeddings", default=length)
    # Phi-3 has this entry beside the RoPE entries, not among them.
    original = config.count("original_max_position_embeddings", default=original)
    factor = _factor(read) if kind == "llama3" else read.number("factor", default=length / original)
    settings = {"factor": factor, "original_length": original}
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if high <= low:
            raise ModelError(
                f"config.json, RoPE: high_freq_factor {high} must be above low_freq_factor {low}; correct them"
            )
        return {**settings, "low_frequency_factor": low, "high_frequency_factor": high}
    if kind == "yarn":
        return {
            **settings,
            **_yarn_attention(read, factor),
            "beta_fast": read.number("beta_fast", default=32.0),
            "beta_slow": read.number("beta_slow", default=1.0),
            "truncate": read.flag("truncate", True),
        }
    grown = math.sqrt(1 + math.log(factor) / math.log(max(2, original))) if factor > 1 else 1.0
    return {
        **settings,
        "attention_factor": read.number("attention_factor", default=grown),
        "short_factors": read.numbers("short_factor", width // 2),
        "long_factors": read.numbers("long_factor", width // 2),
    }


def _factor(read: ConfigReader) -> float:
    factor = read.number("factor")
    if factor < 1:
        raise ModelError(f"config.json, RoPE: factor {factor} is below 1; correct it to 1 or more")
    if factor > _LARGEST_FACTOR:
        raise ModelError(f"config.json, RoPE: factor {factor} is above {_LARGEST_FACTOR}; correct it")
    return factor


def _alpha(read: ConfigReader) -> float:
    alpha = read.number("alpha")
    if not 0 < alpha <= _LARGEST_FACTOR:
        raise ModelError(f"config.json, RoPE: alpha {alpha} must be above 0 and at most {_LARGEST_FACTOR}; correct it")
    return alpha


def _yarn_attention(read: ConfigReader, factor: float) -> dict[str, float]:
    """Return YaRN's `attention_factor`, as given or derived from `factor`, and `sharpening`; see `RopeConfig`."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, everywhere = read.optional_number("mscale"), read.optional_number("mscale_all_dim")
    ratio = scale(own) / scale(everywhere) if own and everywhere else scale(1.0)
    sharpening = scale(everywhere) ** 2 if everywhere else 1.0
    return {"attention_factor": read.number("attention_factor", default=ratio), "sharpening": sharpening}
