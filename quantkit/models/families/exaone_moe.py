"""K-EXAONE: EXAONE 4 with norms before attention and MLP, and experts as in DeepSeek-V3."""

from dataclasses import replace

from quantkit.models.families.exaone4 import FAMILY as EXAONE4
from quantkit.models.family import BALANCED_EXPERTS, Parts

FAMILY = replace(
    EXAONE4,
    hf_names=("ExaoneMoeForCausalLM",),
    parts=Parts(),
    experts=BALANCED_EXPERTS,
    defaults={
        **EXAONE4.defaults,
        "first_k_dense_replace": 1,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.5,
    },
    stored_tensors={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
)
