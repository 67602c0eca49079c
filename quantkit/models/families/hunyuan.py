"""HunYuan dense: Llama with norms on queries and keys behind the rotation."""

from quantkit.models.family import Family

FAMILY = Family(hf_names=("HunYuanDenseV1ForCausalLM",), native=False)
