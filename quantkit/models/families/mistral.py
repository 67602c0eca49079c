"""Mistral: Llama with an optional sliding window; the linears are the same."""

from quantkit.models.families.llama import FAMILY as LLAMA
from quantkit.models.family import Family, Window

FAMILY = Family(
    hf_names=("MistralForCausalLM",),
    window=Window(rule="all"),
    defaults={"sliding_window": 4096},
    gguf=LLAMA.gguf,
)
