"""OLMo 3: OLMo 2 with a window in three layers of four."""

from dataclasses import replace

from quantkit.models.families.olmo2 import FAMILY as OLMO2
from quantkit.models.family import Window

FAMILY = replace(OLMO2, hf_names=("Olmo3ForCausalLM",), native=False, window=Window(rule="pattern", pattern=4))
