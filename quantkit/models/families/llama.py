"""Llama: the family whose names are the defaults."""

from quantkit.models.family import Architecture

ARCHITECTURE = Architecture(hf_names=("LlamaForCausalLM",))
