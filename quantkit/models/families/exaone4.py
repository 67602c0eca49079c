"""EXAONE 4: norms only behind attention and MLP, and on each query and key head."""

from quantkit.models.families.olmo2 import FAMILY as OLMO2
from quantkit.models.family import Family, QueryKeyNorm, Window

FAMILY = Family(
    hf_names=("Exaone4ForCausalLM",),
    parts=OLMO2.parts,
    qk_norm=QueryKeyNorm(),
    window=Window(rule="pattern", pattern=4),
    native=False,
)
