"""DeepSeek-V2: multi-head latent attention, dense first layers, then experts with shared ones beside them."""

from dataclasses import replace

from quantkit.models.family import SHARED_EXPERTS, Family, Rope

FAMILY = Family(
    hf_names=("DeepseekV2ForCausalLM",),
    latent=True,
    rope=Rope(interleaved=True),
    # Weights of the chosen are never made to sum to one here, whatever config.json says.
    experts=replace(SHARED_EXPERTS, normalize=False, groups="best", scale="routed_scaling_factor", exact=True),
    defaults={"topk_method": "greedy"},
)
