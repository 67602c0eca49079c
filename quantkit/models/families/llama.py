"""Llama: the family whose names are the defaults."""

from quantkit.models.family import Family
from quantkit.models.gguf_names import GGUFNames

FAMILY = Family(
    # The others are Llama under names of their own.
    hf_names=("LlamaForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
    keys={"attention_bias": "qkv_bias"},
    not_native=("clip_qkv",),
    gguf=GGUFNames(name="llama", interleaved=True),
)
