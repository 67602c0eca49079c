"""HunYuan dense: Llama with norms on queries and keys behind the rotation."""

from quantkit.models.family import Family, QueryKeyNorm

FAMILY = Family(
    hf_names=("HunYuanDenseV1ForCausalLM",),
    native=False,
    model_types=("hunyuan_v1_dense",),
    qk_norm=QueryKeyNorm(query="self_attn.query_layernorm", key="self_attn.key_layernorm"),
)
