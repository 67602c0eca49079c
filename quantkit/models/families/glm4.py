"""GLM-4 (0414): norms before and after attention and MLP, half of each head rotated in neighbouring pairs."""

from dataclasses import replace

from quantkit.models.families.glm import FAMILY as GLM

FAMILY = replace(
    GLM,
    hf_names=("Glm4ForCausalLM",),
    parts=replace(GLM.parts, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm"),
)
