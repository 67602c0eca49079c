"""OLMoE: experts in place of the MLP, and norms over all queries and all keys of a token."""

from quantkit.models.family import Experts, Family, Multipliers, QueryKeyNorm

FAMILY = Family(
    hf_names=("OlmoeForCausalLM",),
    qk_norm=QueryKeyNorm(over="projection"),
    experts=Experts(width="intermediate_size"),
    defaults={"norm_topk_prob": False, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    multipliers=Multipliers(clip="clip_qkv"),
)
