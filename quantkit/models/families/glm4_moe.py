"""GLM-4.5: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3."""

from quantkit.models.family import BALANCED_EXPERTS, Biases, Family, QueryKeyNorm, Rope

FAMILY = Family(
    hf_names=("Glm4MoeForCausalLM",),
    experts=BALANCED_EXPERTS,
    qk_norm=QueryKeyNorm(switch="use_qk_norm"),
    rope=Rope(partial=0.5),
    biases=Biases(output=False),
    defaults={
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
)
