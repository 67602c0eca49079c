"""GLM-4.7 Flash: DeepSeek-V3 with its groups of experts put together."""

from dataclasses import replace

from quantkit.models.families.deepseek_v2 import SIZES
from quantkit.models.families.deepseek_v3 import FAMILY as DEEPSEEK_V3

FAMILY = replace(
    DEEPSEEK_V3,
    hf_names=("Glm4MoeLiteForCausalLM",),
    model_types=(),
    defaults={
        **SIZES,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    },
)
