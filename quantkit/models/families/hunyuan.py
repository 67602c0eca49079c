"""HunYuan: norms of queries and keys follow the rotation."""

from dataclasses import replace

from quantkit.models.family import BALANCED_EXPERTS, Experts, Family, QueryKeyNorm, Rope

# HunYuan dense: Llama with norms on queries and keys after the rotation.
HUNYUAN = Family(
    hf_names=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    qk_norm=QueryKeyNorm(after_rotation=True, query="self_attn.query_layernorm", key="self_attn.key_layernorm"),
    rope=Rope(fixed_alpha=True),
    defaults={"rms_norm_eps": 1e-5},
)
_SHARED = "mlp.shared_mlp"

FAMILIES = {
    "hunyuan": HUNYUAN,
    # HunYuan with routed experts and a shared expert in every layer.
    "hunyuan-moe": replace(
        HUNYUAN,
        hf_names=("HunYuanMoEV1ForCausalLM",),
        model_types=("hunyuan_v1_moe",),
        experts=Experts(
            router="mlp.gate.wg",
            width="intermediate_size",
            normalize=True,
            shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            shared_down="mlp.shared_mlp.down_proj",
            shared_width="intermediate_size",
            exact=True,
        ),
        keys={"num_experts_per_tok": "moe_topk"},
        defaults={**HUNYUAN.defaults, "num_experts": 1, "moe_topk": 1},
    ),
    # HunYuan 3: norms on queries and keys, dense first layers, then experts with a bias each on sigmoid scores.
    "hy-v3": Family(
        hf_names=("HYV3ForCausalLM",),
        qk_norm=QueryKeyNorm(),
        rope=Rope(theta=11_158_840.0),
        experts=replace(
            BALANCED_EXPERTS,
            router="mlp.router.gate",
            balance="mlp.e_score_correction_bias",
            groups=None,
            normalize=True,
            scale="router_scaling_factor",
            shared_up=(f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
            shared_down=f"{_SHARED}.down_proj",
        ),
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        stored_modules={"mlp.gate": "mlp.router.gate", "mlp.shared_experts": _SHARED},
        stored_tensors={"mlp.e_score_correction_bias": "mlp.expert_bias"},
    ),
}
