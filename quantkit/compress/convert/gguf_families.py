"""Model families as GGUF knows them: names of tensors and entries, as data. Torch-free.

Source: llama.cpp `convert_hf_to_gguf.py` and gguf-py `constants.py`, `tensor_mapping.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture of GGUF. The defaults are Llama's.

    Args:
        name: `general.architecture`.
        layers: name of each module of a layer by its relative name in transformers.
        outer: name of each module outside the layers.
        prefix: of a layer's modules in transformers.
        interleaved: modules whose rows are reordered, because rotary pairs lie next to each other in GGUF.
        norm_offset: added to the weights of norms, which transformers stores less one.
        transposed: linears are stored (inputs, outputs) in transformers.
        numbers: entry after `<name>.` by key of config.json; a key that is missing there is left out.
        rotary: whether there are rotary embeddings.
        scalar_is_width: attention is scaled by the head's width, so `query_pre_attn_scalar` must be that.
    """

    name: str
    layers: Mapping[str, str]
    outer: Mapping[str, str] = field(
        default_factory=lambda: {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    )
    prefix: str = "model.layers"
    interleaved: tuple[str, ...] = ()
    norm_offset: float = 0.0
    transposed: bool = False
    numbers: Mapping[str, str] = field(default_factory=lambda: _NUMBERS)
    rotary: bool = True
    scalar_is_width: bool = False


_LLAMA = Family(
    name="llama",
    layers={**_ATTENTION, "post_attention_layernorm": "ffn_norm", **_MLP},
    interleaved=("self_attn.q_proj", "self_attn.k_proj"),
)
_QWEN2 = replace(_LLAMA, name="qwen2", interleaved=())
_GEMMA = replace(_QWEN2, name="gemma", norm_offset=1.0)
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    layers={**_ATTENTION, **_SANDWICH, **_MLP},
    numbers={
        **_NUMBERS,
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    scalar_is_width=True,
)
_PHI3 = Family(
    name="phi3",
    layers={
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    numbers={**_NUMBERS, "rope.scaling.original_context_length": "original_max_position_embeddings"},
)
_GPT2 = Family(
    name="gpt2",
    layers={
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    outer={
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    },
    prefix="transformer.h",
    transposed=True,
    numbers={
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "vocab_size": "vocab_size",
    },
    rotary=False,
)

# By the class name that config.json carries.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(_QWEN2, name="qwen3", layers={**_QWEN2.layers, **_HEAD_NORMS}),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(_GEMMA2, name="gemma3", layers={**_GEMMA2.layers, **_HEAD_NORMS}),
    "Phi3ForCausalLM": _PHI3,
    "GPT2LMHeadModel": _GPT2,
}
