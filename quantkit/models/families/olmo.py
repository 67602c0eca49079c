"""OLMo and EXAONE. In some of them, norms follow attention and MLP instead of preceding them."""

from dataclasses import replace

from quantkit.models.family import BALANCED_EXPERTS, Experts, Family, Multipliers, Parts, QueryKeyNorm, Rope, Window

# OLMo 2: norms only after attention and MLP, and over all queries and all keys of a token.
OLMO2 = Family(
    hf_names=("Olmo2ForCausalLM",),
    parts=Parts(
        input_norm=None,
        attention_norm="post_attention_layernorm",
        mlp_norm=None,
        output_norm="post_feedforward_layernorm",
    ),
    qk_norm=QueryKeyNorm(over="projection"),
    defaults={"rms_norm_eps": 1e-5},
)
# EXAONE 4: OLMo 2 with norms on each query and key head; in models with windows, other layers have no positions.
EXAONE4 = replace(
    OLMO2,
    hf_names=("Exaone4ForCausalLM",),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="pattern", pattern=4),
    rope=Rope(layers="local"),
    defaults={**OLMO2.defaults, "sliding_window": 4096},
)

FAMILIES = {
    # OLMo: Llama with layer norms that have no weights, so that nothing can absorb a scale before q or gate.
    "olmo": Family(
        hf_names=("OlmoForCausalLM",),
        norm="bare",
        multipliers=Multipliers(clip="clip_qkv"),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo2": OLMO2,
    # OLMo 3: OLMo 2 with a window in three of four layers; the wavelengths of these layers are never scaled.
    "olmo3": replace(
        OLMO2,
        hf_names=("Olmo3ForCausalLM",),
        window=Window(rule="pattern", pattern=4),
        rope=Rope(theta=500_000.0, local_scaled=False),
        defaults={**OLMO2.defaults, "sliding_window": 4096},
    ),
    # OLMoE: experts in place of the MLP, and norms over all queries and all keys of a token.
    "olmoe": Family(
        hf_names=("OlmoeForCausalLM",),
        qk_norm=QueryKeyNorm(over="projection"),
        experts=Experts(width="intermediate_size"),
        defaults={"norm_topk_prob": False, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        multipliers=Multipliers(clip="clip_qkv"),
    ),
    # FlexOlmo: OLMo 2 with experts in place of the MLP.
    "flex-olmo": replace(
        OLMO2,
        hf_names=("FlexOlmoForCausalLM",),
        rope=Rope(theta=500_000.0),
        experts=Experts(width="intermediate_size"),
        defaults={"norm_topk_prob": False, "num_experts": 7, "num_experts_per_tok": 5},
    ),
    "exaone4": EXAONE4,
    # K-EXAONE: EXAONE 4 with norms before attention and MLP, and experts as in DeepSeek-V3.
    "exaone-moe": replace(
        EXAONE4,
        hf_names=("ExaoneMoeForCausalLM",),
        parts=Parts(),
        experts=BALANCED_EXPERTS,
        defaults={
            **EXAONE4.defaults,
            "first_k_dense_replace": 1,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
        },
        stored_tensors={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
    ),
}
