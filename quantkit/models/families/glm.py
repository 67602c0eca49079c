"""GLM-4: half of each head rotated."""

from dataclasses import replace

from quantkit.models.family import BALANCED_EXPERTS, Biases, Family, Parts, QueryKeyNorm, Rope
from quantkit.models.mtp import MTP

# GLM-4 (first series): Llama with half of each head rotated in neighbouring pairs, gate and up in one.
GLM = Family(
    hf_names=("GlmForCausalLM",),
    parts=Parts(up=("mlp.gate_up_proj",)),
    rope=Rope(partial=0.5, interleaved=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-07},
    biases=Biases(output=False),
)

FAMILIES = {
    "glm": GLM,
    # GLM-4 (0414): norms before and after attention and MLP, half of each head rotated in neighbouring pairs.
    "glm4": replace(
        GLM,
        hf_names=("Glm4ForCausalLM",),
        parts=replace(GLM.parts, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm"),
    ),
    # GLM-4.5: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3.
    "glm4-moe": Family(
        hf_names=("Glm4MoeForCausalLM",),
        experts=BALANCED_EXPERTS,
        mtp=MTP(),
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
    ),
}
