"""HunYuan dense: Llama with norms on queries and keys behind the rotation."""

from quantkit.models.family import Architecture

ARCHITECTURE = Architecture(hf_names=("HunYuanDenseV1ForCausalLM",), native=False)
