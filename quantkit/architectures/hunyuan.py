"""HunYuan dense: Llama with norms on queries and keys behind the rotation."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("HunYuanDenseV1ForCausalLM",), native=False)
