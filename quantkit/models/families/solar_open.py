"""Solar Open: Llama with experts as in DeepSeek-V3 in every layer."""

from quantkit.models.family import BALANCED_EXPERTS, Biases, Family, Rope

FAMILY = Family(
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
)
