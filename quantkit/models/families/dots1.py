"""dots.llm1: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3."""

from quantkit.models.family import LLAMA_SETS, Experts, Family, expert_sets

FAMILY = Family(
    hf_names=("Dots1ForCausalLM",),
    linear_sets=(*LLAMA_SETS[:2], *expert_sets(shared="mlp.shared_experts")),
    experts=Experts(),
    native=False,
)
