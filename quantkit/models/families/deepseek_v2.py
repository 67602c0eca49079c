"""DeepSeek-V2: multi-head latent attention, dense first layers, then experts with shared ones beside them."""

from quantkit.models.family import MLA_SETS, SHARED_EXPERTS, Family, expert_sets

FAMILY = Family(
    hf_names=("DeepseekV2ForCausalLM",),
    linear_sets=(*MLA_SETS, *expert_sets(shared="mlp.shared_experts")),
    experts=SHARED_EXPERTS,
    native=False,
)
