"""Falcon: q, k and v in one projection; attention and MLP side by side behind one norm or two, or one after another."""

from quantkit.models.family import Family, inside
from quantkit.models.linear_sets import LinearSet

_QKV, _UP = ("self_attention.query_key_value",), ("mlp.dense_h_to_4h",)
_OLD_IN_TURN = (("parallel_attn", False), ("new_decoder_architecture", False))

FAMILY = Family(
    hf_names=("FalconForCausalLM",),
    **inside("transformer", layers="h", embedding="word_embeddings", final_norm="ln_f"),
    # The first that fits counts: two norms, then the halves one after another, then one norm for both.
    linear_sets=(
        LinearSet(linears=_QKV, source="ln_attn", parent="self_attention", optional=True),
        LinearSet(linears=_QKV, source="input_layernorm", parent="self_attention", when=_OLD_IN_TURN),
        LinearSet(linears=(*_QKV, *_UP), source="input_layernorm", parent="", optional=True),
        LinearSet(linears=("self_attention.dense",), source=None, parent="self_attention.dense"),
        LinearSet(linears=_UP, source="ln_mlp", parent="mlp", optional=True),
        LinearSet(linears=_UP, source="post_attention_layernorm", parent="mlp", optional=True),
        LinearSet(linears=("mlp.dense_4h_to_h",), source=None, parent="mlp.dense_4h_to_h"),
    ),
    decode_at_load=True,
    native=False,
    known=False,
    norm="layer",
    parallel="parallel_attn",
    defaults={"parallel_attn": True, "new_decoder_architecture": False, "tie_word_embeddings": True},
)
