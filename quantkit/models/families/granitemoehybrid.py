"""Granite 4 hybrids: Mamba 2 in most layers, attention mostly without positions, Granite's constants.

The MLP that every token passes is all there is, or stands beside experts.
"""

from dataclasses import replace

from quantkit.models.families.granitemoeshared import FAMILY as GRANITEMOESHARED
from quantkit.models.family import Parts, Rope
from quantkit.models.recurrent import MAMBA, MAMBA_DEFAULTS

_EXPERTS = GRANITEMOESHARED.experts
assert _EXPERTS is not None

FAMILY = replace(
    GRANITEMOESHARED,
    hf_names=("GraniteMoeHybridForCausalLM",),
    keys={"intermediate_size": "shared_intermediate_size", "moe_intermediate_size": "intermediate_size"},
    parts=Parts(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    experts=replace(_EXPERTS, width="moe_intermediate_size"),
    recurrent=MAMBA,
    rope=Rope(layers="named"),
    defaults={**GRANITEMOESHARED.defaults, **MAMBA_DEFAULTS, "shared_intermediate_size": 1024},
)
