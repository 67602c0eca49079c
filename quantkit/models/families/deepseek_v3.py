"""DeepSeek-V3 and R1: DeepSeek-V2 with experts chosen by sigmoid scores, a bias on each, and in groups."""

from quantkit.models.family import BALANCED_EXPERTS, Family

FAMILY = Family(
    latent=True,
    hf_names=("DeepseekV3ForCausalLM",),
    experts=BALANCED_EXPERTS,
    native=False,
    model_types=("kimi_k2",),
)
