"""dots.llm1: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3."""

from quantkit.models.family import BALANCED_EXPERTS, Family, QueryKeyNorm

FAMILY = Family(hf_names=("Dots1ForCausalLM",), native=False, experts=BALANCED_EXPERTS, qk_norm=QueryKeyNorm())
