"""Qwen3: Llama with a norm on each query and key head, which sits behind q and k and so changes nothing here."""

from quantkit.models.family import Family, QueryKeyNorm, Window
from quantkit.models.gguf_names import GGUFNames

FAMILY = Family(
    hf_names=("Qwen3ForCausalLM",),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="upper", switch="use_sliding_window"),
    defaults={"max_window_layers": 28, "head_dim": 128},
    gguf=GGUFNames(name="qwen3"),
)
