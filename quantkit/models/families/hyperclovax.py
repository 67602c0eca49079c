"""HyperCLOVA X: Granite with norms after attention and MLP, and logits multiplied in place of divided."""

from dataclasses import replace

from quantkit.models.families.granite import FAMILY as GRANITE
from quantkit.models.family import Parts

FAMILY = replace(
    GRANITE,
    hf_names=("HyperCLOVAXForCausalLM",),
    parts=Parts(attention_norm="post_norm1", output_norm="post_norm2"),
    multipliers=replace(GRANITE.multipliers, logits="logits_scaling", logits_divisor=None),
    defaults=dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
)
