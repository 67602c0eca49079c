"""DeepSeek-V3 and R1: DeepSeek-V2 with experts chosen by sigmoid scores, a bias on each, and in groups."""

from dataclasses import replace

from quantkit.models.families.deepseek_v2 import FAMILY as DEEPSEEK_V2
from quantkit.models.family import BALANCED_EXPERTS

FAMILY = replace(DEEPSEEK_V2, hf_names=("DeepseekV3ForCausalLM",), model_types=("kimi_k2",), experts=BALANCED_EXPERTS)
