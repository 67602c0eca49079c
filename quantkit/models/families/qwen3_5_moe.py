"""Qwen3.5-MoE without images: Qwen3.5 with experts beside one that every token sees; the chosen always sum to one."""

from dataclasses import replace

from quantkit.models.families.qwen2_moe import EXPERTS
from quantkit.models.families.qwen3_5 import FAMILY as QWEN3_5
from quantkit.models.family import Wrapper

FAMILY = replace(
    QWEN3_5,
    hf_names=("Qwen3_5MoeForCausalLM",),
    model_types=("qwen3_5_moe_text",),
    experts=replace(EXPERTS, normalize=True),
    wrapper=Wrapper(hf_names=("Qwen3_5MoeForConditionalGeneration",)),
)
