"""Qwen2: Llama with biases on q, k and v; the biases stay as they are, that of v shrinks with its smoothing scale."""

from quantkit.models.family import Biases, Family, Window
from quantkit.models.gguf_names import GGUFNames

FAMILY = Family(
    hf_names=("Qwen2ForCausalLM",),
    window=Window(rule="upper", switch="use_sliding_window"),
    defaults={"max_window_layers": 28},
    biases=Biases(qkv=True),
    gguf=GGUFNames(name="qwen2"),
)
