"""Gemma 3, text only: Gemma 2 with norms on queries and keys, and two wavelengths: one for layers with a window."""

from dataclasses import replace

from quantkit.models.families.gemma2 import GGUF
from quantkit.models.family import Family, Multipliers, Parts, QueryKeyNorm, Rope, Window

FAMILY = Family(
    hf_names=("Gemma3ForCausalLM",),
    parts=Parts(
        attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        output_norm="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    qk_norm=QueryKeyNorm(),
    window=Window(rule="pattern", pattern=6),
    rope=Rope(theta=1_000_000.0, local_theta=10_000.0),
    multipliers=Multipliers(
        root_embedding=True,
        attention_root="query_pre_attn_scalar",
        attention_softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
    ),
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    not_native=("use_bidirectional_attention",),
    model_types=("gemma3_text",),
    gguf=replace(GGUF, name="gemma3"),
)
