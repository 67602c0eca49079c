"""MiniMax-M2: norms over all queries and all keys, half of each head rotated, experts chosen by balanced sigmoids."""

from dataclasses import replace

from quantkit.models.families.mixtral import FAMILY as MIXTRAL
from quantkit.models.family import QueryKeyNorm, Rope

_EXPERTS = MIXTRAL.experts
assert _EXPERTS is not None

FAMILY = replace(
    MIXTRAL,
    hf_names=("MiniMaxM2ForCausalLM",),
    window=None,
    qk_norm=QueryKeyNorm(over="projection"),
    rope=Rope(theta=5_000_000.0, width="rotary_dim"),
    experts=replace(_EXPERTS, balance="block_sparse_moe.e_score_correction_bias", scoring="sigmoid"),
    defaults={"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
)
