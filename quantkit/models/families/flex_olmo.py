"""FlexOlmo: OLMo 2 with experts in place of the MLP."""

from dataclasses import replace

from quantkit.models.families.olmo2 import FAMILY as OLMO2
from quantkit.models.family import Experts, Rope

FAMILY = replace(
    OLMO2,
    hf_names=("FlexOlmoForCausalLM",),
    rope=Rope(theta=500_000.0),
    experts=Experts(width="intermediate_size"),
    defaults={"norm_topk_prob": False, "num_experts": 7, "num_experts_per_tok": 5},
)
