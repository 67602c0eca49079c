"""Qwen3-MoE: Qwen3 with experts in place of the MLP."""

from quantkit.models.family import Experts, Family, QueryKeyNorm, Window

FAMILY = Family(
    hf_names=("Qwen3MoeForCausalLM",),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="all", switch="use_sliding_window"),
    experts=Experts(),
    defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
)
