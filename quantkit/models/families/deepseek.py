"""DeepSeek-V2 and V3, and families that use the latent attention or the experts of these models."""

from dataclasses import replace

from quantkit.models.family import BALANCED_EXPERTS, SHARED_EXPERTS, Biases, Family, QueryKeyNorm, Rope, Window
from quantkit.models.mtp import MTP
from quantkit.models.stored_names import GGUF_EXPERTS, GGUF_NUMBERS, GGUFNames

SIZES = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_GGUF = GGUFNames(
    name="deepseek2",
    numbers={
        **GGUF_NUMBERS,
        **GGUF_EXPERTS,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    is_written=False,
)
# DeepSeek-V2: multi-head latent attention, dense first layers, then routed and shared experts.
DEEPSEEK_V2 = Family(
    hf_names=("DeepseekV2ForCausalLM",),
    latent=True,
    rope=Rope(interleaved=True),
    # The weights of the chosen experts are never normalized, whatever config.json says.
    experts=replace(SHARED_EXPERTS, normalize=False, groups="best", scale="routed_scaling_factor", exact=True),
    defaults={
        **SIZES,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    gguf=_GGUF,
)
# DeepSeek-V3 and R1: DeepSeek-V2 with groups of experts, chosen by sigmoid scores plus a bias per expert.
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    hf_names=("DeepseekV3ForCausalLM",),
    model_types=("kimi_k2",),
    rope=Rope(interleaved="rope_interleave"),
    experts=BALANCED_EXPERTS,
    mtp=MTP(),
    defaults={
        **SIZES,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
)

FAMILIES = {
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    # DeepSeek-V3.2, only for planning: DeepSeek-V3 with an indexer that picks which entries of the cache a query reads.
    "deepseek-v32": Family(
        latent=True, experts=BALANCED_EXPERTS, mtp=MTP(), defaults={"index_head_dim": 128}, native=False
    ),
    # dots.llm1: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3.
    "dots1": Family(
        hf_names=("Dots1ForCausalLM",),
        experts=BALANCED_EXPERTS,
        qk_norm=QueryKeyNorm(),
        window=Window(rule="upper"),
        defaults={"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
    ),
    # Solar Open: Llama with experts as in DeepSeek-V3 in every layer.
    "solar-open": Family(
        hf_names=("SolarOpenForCausalLM",),
        experts=BALANCED_EXPERTS,
        rope=Rope(theta=1_000_000.0),
        biases=Biases(output=False),
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
        },
    ),
    # Youtu: the latent attention of DeepSeek-V3 with an MLP.
    "youtu": Family(
        hf_names=("YoutuForCausalLM",),
        latent=True,
        rope=Rope(interleaved="rope_interleave"),
        defaults={**SIZES, "tie_word_embeddings": True},
    ),
    # GLM-4.7 Flash: DeepSeek-V3 without groups of experts.
    "glm4-moe-lite": replace(
        DEEPSEEK_V3,
        hf_names=("Glm4MoeLiteForCausalLM",),
        gguf=None,
        model_types=(),
        defaults={
            **SIZES,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
    ),
}
