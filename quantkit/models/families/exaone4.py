"""EXAONE 4: OLMo 2 with norms on each query and key head, and a window in three layers of four."""

from dataclasses import replace

from quantkit.models.families.olmo3 import FAMILY as OLMO3
from quantkit.models.family import QueryKeyNorm

FAMILY = replace(OLMO3, hf_names=("Exaone4ForCausalLM",), qk_norm=QueryKeyNorm())
