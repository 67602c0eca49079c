"""DeepSeek-V3 and R1: DeepSeek-V2 with experts chosen by sigmoid scores, a bias on each, and in groups."""

from quantkit.models.family import BALANCED_EXPERTS, MLA_SETS, Family, expert_sets

FAMILY = Family(
    hf_names=("DeepseekV3ForCausalLM",),
    linear_sets=(*MLA_SETS, *expert_sets(shared="mlp.shared_experts")),
    experts=BALANCED_EXPERTS,
    native=False,
    model_types=("kimi_k2",),
)
