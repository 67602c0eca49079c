"""DeepSeek-V2: multi-head latent attention, dense first layers, then experts with shared ones beside them."""

from quantkit.models.family import SHARED_EXPERTS, Family

FAMILY = Family(
    latent=True,
    hf_names=("DeepseekV2ForCausalLM",),
    experts=SHARED_EXPERTS,
    native=False,
)
