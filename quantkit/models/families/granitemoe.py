"""Granite with experts in place of the MLP, which are stored in two tensors for a layer."""

from dataclasses import replace

from quantkit.models.families.granite import FAMILY as GRANITE
from quantkit.models.family import Experts

_EXPERTS = "block_sparse_moe.experts"

FAMILY = replace(
    GRANITE,
    hf_names=("GraniteMoeForCausalLM",),
    experts=Experts(
        router="block_sparse_moe.router",
        up=(f"{_EXPERTS}.{{expert}}.gate_proj", f"{_EXPERTS}.{{expert}}.up_proj"),
        down=f"{_EXPERTS}.{{expert}}.down_proj",
        stacked_up="block_sparse_moe.input_linear.weight",
        stacked_down="block_sparse_moe.output_linear.weight",
        width="intermediate_size",
        normalize=True,
    ),
    compressed_experts=False,
    stored_tensors={"block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight"},
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
)
