"""OLMo: Llama with layer norms that have no weights, so that nothing can absorb a scale before q or gate."""

from quantkit.models.family import Family, Multipliers

FAMILY = Family(
    hf_names=("OlmoForCausalLM",),
    norm="bare",
    multipliers=Multipliers(clip="clip_qkv"),
    defaults={"rms_norm_eps": 1e-5},
)
