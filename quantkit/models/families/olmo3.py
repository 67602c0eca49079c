"""OLMo 3: OLMo 2 with a window in three layers of four."""

from quantkit.models.families.olmo2 import FAMILY as OLMO2
from quantkit.models.family import Family, Window

FAMILY = Family(
    hf_names=("Olmo3ForCausalLM",),
    parts=OLMO2.parts,
    qk_norm=OLMO2.qk_norm,
    window=Window(rule="pattern", pattern=4),
    native=False,
)
