"""dots.llm1: norms on queries and keys, dense first layers, then experts as in DeepSeek-V3."""

from quantkit.models.family import BALANCED_EXPERTS, Family, QueryKeyNorm, Window

FAMILY = Family(
    hf_names=("Dots1ForCausalLM",),
    experts=BALANCED_EXPERTS,
    qk_norm=QueryKeyNorm(),
    window=Window(rule="upper"),
    defaults={"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
)
