"""EXAONE 4: OLMo 2 with norms on each query and key head; with windows, only layers that have one have positions."""

from dataclasses import replace

from quantkit.models.families.olmo2 import FAMILY as OLMO2
from quantkit.models.family import QueryKeyNorm, Rope, Window

FAMILY = replace(
    OLMO2,
    hf_names=("Exaone4ForCausalLM",),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="pattern", pattern=4),
    rope=Rope(layers="local"),
    defaults={**OLMO2.defaults, "sliding_window": 4096},
)
