"""DeepSeek-V2: multi-head latent attention, dense first layers, then experts with shared ones beside them."""

from dataclasses import replace

from quantkit.models.family import SHARED_EXPERTS, Family, Rope

SIZES = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

FAMILY = Family(
    hf_names=("DeepseekV2ForCausalLM",),
    latent=True,
    rope=Rope(interleaved=True),
    # Weights of the chosen are never made to sum to one here, whatever config.json says.
    experts=replace(SHARED_EXPERTS, normalize=False, groups="best", scale="routed_scaling_factor", exact=True),
    defaults={
        **SIZES,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
)
