"""OLMoE: experts in place of the MLP, and norms over all queries and all keys of a token."""

from quantkit.architectures.base import FUSED_EXPERTS, Architecture, Experts, QueryKeyNorm

ARCHITECTURE = Architecture(
    hf_names=("OlmoeForCausalLM",),
    not_compressible=FUSED_EXPERTS,
    qk_norm=QueryKeyNorm(over="projection"),
    experts=Experts(width="intermediate_size"),
    defaults={"norm_topk_prob": False, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    not_native=("clip_qkv",),
)
