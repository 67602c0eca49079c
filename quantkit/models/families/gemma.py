"""Gemma: norms that add one to their weight, and scaled embeddings."""

from dataclasses import replace

from quantkit.models.family import Family, Multipliers, Parts, QueryKeyNorm, Rope, Window
from quantkit.models.stored_names import GGUF_NUMBERS, GGUFNames

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
# Gemma 2: Gemma with norms before and after attention and MLP, softcaps, and a window in every other layer.
GEMMA2 = Family(
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

FAMILIES = {
    # Gemma: norms that add one to their weight, embeddings times sqrt(hidden_size), and independent head_dim.
    "gemma": Family(
        hf_names=("GemmaForCausalLM",),
        norm_offset=1.0,
        multipliers=Multipliers(root_embedding=True),
        activation="gelu_pytorch_tanh",  # released configs say "gelu" and mean its approximation
        defaults={"head_dim": 256, "tie_word_embeddings": True},
        not_native=("use_bidirectional_attention",),
        gguf=GGUFNames(name="gemma"),
    ),
    "gemma2": GEMMA2,
    # Gemma 3, text only: Gemma 2 with norms on queries and keys, and another RoPE base in layers with a window.
    "gemma3": replace(
        GEMMA2,
        hf_names=("Gemma3ForCausalLM",),
        model_types=("gemma3_text",),
        qk_norm=QueryKeyNorm(),
        window=Window(rule="pattern", pattern=6),
        rope=Rope(theta=1_000_000.0, local_theta=10_000.0),
        defaults=DEFAULTS,  # softcaps only where config.json has them
        gguf=replace(GGUF, name="gemma3", fixed={"model_type": "gemma3_text"}),
    ),
    # VaultGemma: Gemma 2 without norms after attention and MLP.
    "vaultgemma": replace(
        GEMMA2,
        hf_names=("VaultGemmaForCausalLM",),
        parts=Parts(mlp_norm="pre_feedforward_layernorm"),
        not_native=(),
        gguf=None,
    ),
}
