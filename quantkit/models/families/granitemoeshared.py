"""Granite with experts, and beside them an MLP that every token passes."""

from dataclasses import replace

from quantkit.models.families.granitemoe import FAMILY as GRANITEMOE

_EXPERTS = GRANITEMOE.experts
assert _EXPERTS is not None

FAMILY = replace(
    GRANITEMOE,
    hf_names=("GraniteMoeSharedForCausalLM",),
    experts=replace(
        _EXPERTS,
        shared_up=("shared_mlp.input_linear",),
        shared_down="shared_mlp.output_linear",
        shared_width="shared_intermediate_size",
    ),
    defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
)
