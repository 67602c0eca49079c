"""ERNIE 4.5 with experts, dense first layers and shared experts."""

from dataclasses import replace

from quantkit.models.families.ernie4_5 import FAMILY as ERNIE
from quantkit.models.family import BALANCED_EXPERTS

FAMILY = replace(
    ERNIE,
    hf_names=("Ernie4_5_MoeForCausalLM",),
    experts=replace(BALANCED_EXPERTS, balance="mlp.moe_statics.e_score_correction_bias"),
    keys={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
        "decoder_sparse_step": "moe_layer_interval",
    },
    stored_modules={"mlp.gate.moe_statics": "mlp.moe_statics"},
)
