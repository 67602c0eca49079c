"""OLMo 2: norms only after attention and MLP, and over all queries and all keys of a token."""

from quantkit.models.family import Family, Parts, QueryKeyNorm

FAMILY = Family(
    hf_names=("Olmo2ForCausalLM",),
    parts=Parts(
        input_norm=None,
        attention_norm="post_attention_layernorm",
        mlp_norm=None,
        output_norm="post_feedforward_layernorm",
    ),
    qk_norm=QueryKeyNorm(over="projection"),
    defaults={"rms_norm_eps": 1e-5},
)
