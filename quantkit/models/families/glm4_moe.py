"""GLM-4.5: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3."""

from quantkit.models.family import BALANCED_EXPERTS, Biases, Family, QueryKeyNorm

FAMILY = Family(
    hf_names=("Glm4MoeForCausalLM",),
    experts=BALANCED_EXPERTS,
    native=False,
    qk_norm=QueryKeyNorm(switch="use_qk_norm"),
    biases=Biases(output=False),
)
