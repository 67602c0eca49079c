"""Llama: the family whose names are the defaults."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("LlamaForCausalLM",))
