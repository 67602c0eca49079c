"""GLM-4 (0414): norms before and after attention and MLP, half of each head rotated in neighbouring pairs."""

from quantkit.models.family import Biases, Family, Parts, Rope

FAMILY = Family(
    hf_names=("Glm4ForCausalLM",),
    parts=Parts(attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm", up=("mlp.gate_up_proj",)),
    rope=Rope(partial=0.5, interleaved=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-07},
    biases=Biases(output=False),
)
