"""HunYuan 3: norms on queries and keys, dense first layers, then experts chosen by balanced sigmoids, scaled."""

from dataclasses import replace

from quantkit.models.family import BALANCED_EXPERTS, Family, QueryKeyNorm, Rope

_SHARED = "mlp.shared_mlp"

FAMILY = Family(
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
)
