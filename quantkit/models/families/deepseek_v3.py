"""DeepSeek-V3 and R1: DeepSeek-V2 with experts chosen by sigmoid scores, a bias on each, and in groups."""

from dataclasses import replace

from quantkit.models.families.deepseek_v2 import FAMILY as DEEPSEEK_V2
from quantkit.models.families.deepseek_v2 import SIZES
from quantkit.models.family import BALANCED_EXPERTS, Rope

FAMILY = replace(
    DEEPSEEK_V2,
    hf_names=("DeepseekV3ForCausalLM",),
    model_types=("kimi_k2",),
    rope=Rope(interleaved="rope_interleave"),
    experts=BALANCED_EXPERTS,
    defaults={
        **SIZES,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
)
