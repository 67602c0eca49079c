"""GLM-4 (0414): norms before and after attention and MLP, half of each head rotated in neighbouring pairs."""

from quantkit.models.family import LLAMA_SETS, Biases, Family, LinearSet, Parts, Rope

FAMILY = Family(
    hf_names=("Glm4ForCausalLM",),
    linear_sets=(
        *LLAMA_SETS[:2],
        LinearSet(linears=("mlp.gate_up_proj",), source="post_attention_layernorm", parent="mlp"),
        LinearSet(linears=("mlp.down_proj",), source=None, parent="mlp.down_proj"),
    ),
    parts=Parts(attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm", up=("mlp.gate_up_proj",)),
    rope=Rope(partial=0.5, interleaved=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-07},
    biases=Biases(output=False),
)
