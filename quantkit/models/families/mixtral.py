"""Mixtral: Mistral with eight experts in place of the MLP, two of them for each token."""

from quantkit.models.family import Experts, Family, Rope, Window

FAMILY = Family(
    hf_names=("MixtralForCausalLM",),
    stored_modules={"mlp": "block_sparse_moe"},
    window=Window(rule="all"),
    rope=Rope(theta=1_000_000.0),
    experts=Experts(
        router="block_sparse_moe.gate",
        up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        down="block_sparse_moe.experts.{expert}.w2",
        width="intermediate_size",
        normalize=True,
    ),
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
)
