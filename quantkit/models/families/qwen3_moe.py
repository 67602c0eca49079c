"""Qwen3-MoE: Qwen3 with experts in place of the MLP."""

from quantkit.models.family import LLAMA_SETS, Experts, Family, QueryKeyNorm, Window, expert_sets

FAMILY = Family(
    hf_names=("Qwen3MoeForCausalLM",),
    linear_sets=(*LLAMA_SETS[:2], *expert_sets()),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="all", switch="use_sliding_window"),
    experts=Experts(),
    defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
)
