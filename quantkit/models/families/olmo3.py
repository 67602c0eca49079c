"""OLMo 3: OLMo 2 with a window in three layers of four, whose wavelengths are never scaled."""

from dataclasses import replace

from quantkit.models.families.olmo2 import FAMILY as OLMO2
from quantkit.models.family import Rope, Window

FAMILY = replace(
    OLMO2,
    hf_names=("Olmo3ForCausalLM",),
    window=Window(rule="pattern", pattern=4),
    rope=Rope(theta=500_000.0, local_scaled=False),
    defaults={**OLMO2.defaults, "sliding_window": 4096},
)
