"""HunYuan dense: Llama with norms on queries and keys behind the rotation."""

from quantkit.models.family import Family, QueryKeyNorm

_NORM = QueryKeyNorm(query="self_attn.query_layernorm", key="self_attn.key_layernorm")

FAMILY = Family(hf_names=("HunYuanDenseV1ForCausalLM",), model_types=("hunyuan_v1_dense",), native=False, qk_norm=_NORM)
