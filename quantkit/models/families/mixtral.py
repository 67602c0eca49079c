"""Mixtral and MiniMax-M2: experts in place of every MLP."""

from dataclasses import replace

from quantkit.models.family import Experts, Family, QueryKeyNorm, Rope, Window
from quantkit.models.stored_names import GGUF_EXPERTS, GGUF_NUMBERS, GGUFNames

_EXPERTS = Experts(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    down="block_sparse_moe.experts.{expert}.w2",
    width="intermediate_size",
    normalize=True,
)
# Mixtral: Mistral with eight experts in place of the MLP, two of them for each token.
MIXTRAL = Family(
    hf_names=("MixtralForCausalLM",),
    stored_modules={"mlp": "block_sparse_moe"},
    window=Window(rule="all"),
    rope=Rope(theta=1_000_000.0),
    experts=_EXPERTS,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    # llama.cpp treats Mixtral as a llama with experts.
    gguf=GGUFNames(
        name="llama",
        interleaved=True,
        numbers={**GGUF_NUMBERS, **GGUF_EXPERTS, "expert_count": "num_local_experts"},
        fixed={"sliding_window": None},
        is_written=False,
    ),
)

FAMILIES = {
    "mixtral": MIXTRAL,
    # MiniMax-M2: norms over all queries and all keys, half of each head rotated, a bias per expert on sigmoid scores.
    "minimax-m2": replace(
        MIXTRAL,
        hf_names=("MiniMaxM2ForCausalLM",),
        window=None,
        gguf=None,
        qk_norm=QueryKeyNorm(over="projection"),
        rope=Rope(theta=5_000_000.0, width="rotary_dim"),
        experts=replace(_EXPERTS, balance="block_sparse_moe.e_score_correction_bias", scoring="sigmoid"),
        defaults={"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    ),
}
