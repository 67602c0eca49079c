"""Qwen3-MoE: Qwen3 with experts in place of the MLP."""

from quantkit.architectures.base import FUSED_EXPERTS, Architecture, Experts, QueryKeyNorm, Window

ARCHITECTURE = Architecture(
    hf_names=("Qwen3MoeForCausalLM",),
    not_compressible=FUSED_EXPERTS,
    qk_norm=QueryKeyNorm(),
    window=Window(rule="all", switch="use_sliding_window"),
    experts=Experts(),
    defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
)
