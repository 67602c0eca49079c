"""Llama: the family whose names are the defaults."""

from quantkit.models.family import Family, GGUFNames

FAMILY = Family(hf_names=("LlamaForCausalLM",), gguf=GGUFNames(name="llama", interleaved=True))
