"""Granite 4 hybrids: Mamba 2 in most layers, attention mostly without positions, Granite's constants; no experts."""

from dataclasses import replace

from quantkit.models.families.granite import FAMILY as GRANITE
from quantkit.models.family import Parts, Rope
from quantkit.models.recurrent import MAMBA, MAMBA_DEFAULTS

FAMILY = replace(
    GRANITE,
    hf_names=("GraniteMoeHybridForCausalLM",),
    # Each layer has an MLP that is a shared expert where there are others, which no file describes.
    only=lambda config: not config.get("num_local_experts"),
    keys={"intermediate_size": "shared_intermediate_size"},
    parts=Parts(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    recurrent=MAMBA,
    rope=Rope(layers="named"),
    defaults={**GRANITE.defaults, **MAMBA_DEFAULTS, "shared_intermediate_size": 1024},
)
