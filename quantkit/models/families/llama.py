"""Llama: the family whose names are the defaults."""

from quantkit.models.family import Family

FAMILY = Family(hf_names=("LlamaForCausalLM",))
