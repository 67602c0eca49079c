"""Helium: Llama with neighbours rotated together."""

from quantkit.models.family import Family, Rope

FAMILY = Family(
    hf_names=("HeliumForCausalLM",),
    rope=Rope(theta=100_000.0, interleaved=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-8},
)
