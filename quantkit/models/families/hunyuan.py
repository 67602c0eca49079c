"""HunYuan dense: Llama with norms on queries and keys behind the rotation."""

from quantkit.models.family import Family, QueryKeyNorm, Rope

FAMILY = Family(
    hf_names=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    qk_norm=QueryKeyNorm(after_rotation=True, query="self_attn.query_layernorm", key="self_attn.key_layernorm"),
    rope=Rope(fixed_alpha=True),
    defaults={"rms_norm_eps": 1e-5},
)
