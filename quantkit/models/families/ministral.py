"""Ministral: Mistral where config.json may list which layers have the window."""

from dataclasses import replace

from quantkit.models.families.mistral import FAMILY as MISTRAL
from quantkit.models.family import Window

FAMILY = replace(MISTRAL, hf_names=("MinistralForCausalLM",), window=Window(rule="listed"), gguf=None)
