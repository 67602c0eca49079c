"""Gemma 2: Gemma with norms before and after attention and MLP, softcaps, and a window in every other layer."""

from quantkit.models.family import Family, Multipliers, Parts, Window
from quantkit.models.gguf_names import GGUF_NUMBERS, GGUFNames

_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GGUF = GGUFNames(
    name="gemma2",
    numbers={**GGUF_NUMBERS, "attention.sliding_window": "sliding_window", **{name: name for name in _SOFTCAPS}},
)
DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

FAMILY = Family(
    hf_names=("Gemma2ForCausalLM",),
    parts=Parts(
        attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        output_norm="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    window=Window(rule="pattern", pattern=2),
    multipliers=Multipliers(
        root_embedding=True,
        attention_root="query_pre_attn_scalar",
        attention_softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
    ),
    defaults={**DEFAULTS, **_SOFTCAPS},
    not_native=("use_bidirectional_attention",),
    gguf=GGUF,
)
