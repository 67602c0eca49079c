"""Phi-3 and Phi-4: Llama with one projection for q, k and v and one for gate and up; long contexts by LongRoPE."""

from quantkit.models.family import Family, Parts, Window
from quantkit.models.gguf_names import GGUF_NUMBERS, GGUFNames

FAMILY = Family(
    hf_names=("Phi3ForCausalLM",),
    parts=Parts(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    window=Window(rule="all"),
    defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    gguf=GGUFNames(
        name="phi3",
        numbers={**GGUF_NUMBERS, "rope.scaling.original_context_length": "original_max_position_embeddings"},
    ),
)
