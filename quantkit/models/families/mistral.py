"""Mistral: Llama with an optional sliding window; the linears are the same."""

from dataclasses import replace

from quantkit.models.families.llama import FAMILY as LLAMA
from quantkit.models.family import Window

FAMILY = replace(LLAMA, hf_names=("MistralForCausalLM",), window=Window(rule="all"), defaults={"sliding_window": 4096})
