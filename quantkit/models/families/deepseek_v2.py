"""DeepSeek-V2: multi-head latent attention, dense first layers, then experts with shared ones beside them."""

from quantkit.models.family import SHARED_EXPERTS, Family

FAMILY = Family(hf_names=("DeepseekV2ForCausalLM",), latent=True, experts=SHARED_EXPERTS, native=False)
