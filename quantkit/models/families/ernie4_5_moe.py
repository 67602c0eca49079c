"""ERNIE 4.5 with experts, dense first layers and shared experts."""

from quantkit.models.family import LLAMA_SETS, Experts, Family, expert_sets

FAMILY = Family(
    hf_names=("Ernie4_5_MoeForCausalLM",),
    linear_sets=(*LLAMA_SETS[:2], *expert_sets(shared="mlp.shared_experts")),
    experts=Experts(),
    stored_modules={"mlp.gate.moe_statics": "mlp.moe_statics"},
    native=False,
)
