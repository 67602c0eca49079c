"""Mellum 2: Qwen3-MoE with windows and MLPs that config.json lists layer by layer."""

from quantkit.models.family import Experts, Family, QueryKeyNorm, Rope, Window

FAMILY = Family(
    hf_names=("MellumForCausalLM",),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="none"),
    rope=Rope(theta=500_000.0, local_theta=10_000.0),
    experts=Experts(),
    defaults={
        "head_dim": 128,
        "sliding_window": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
    },
)
