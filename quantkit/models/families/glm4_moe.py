"""GLM-4.5: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3."""

from quantkit.models.family import BALANCED_EXPERTS, LLAMA_SETS, Biases, Family, QueryKeyNorm, expert_sets

FAMILY = Family(
    hf_names=("Glm4MoeForCausalLM",),
    linear_sets=(*LLAMA_SETS[:2], *expert_sets(shared="mlp.shared_experts")),
    experts=BALANCED_EXPERTS,
    native=False,
    qk_norm=QueryKeyNorm(switch="use_qk_norm"),
    biases=Biases(output=False),
)
