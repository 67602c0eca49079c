"""BLOOM: ALiBi instead of positions, q, k and v in one projection, a norm behind the embedding."""

from quantkit.models.family import Biases, Family, Parts, inside
from quantkit.models.linear_sets import LinearSet

_QKV, _UP = ("self_attention.query_key_value",), ("mlp.dense_h_to_4h",)
_PLAIN = (("apply_residual_connection_post_layernorm", False),)

FAMILY = Family(
    hf_names=("BloomForCausalLM",),
    **inside("transformer", layers="h", embedding="word_embeddings", final_norm="ln_f"),
    # Where the residual stream starts behind the norm, a scale in the norm would change it.
    linear_sets=(
        LinearSet(linears=_QKV, source="input_layernorm", parent="self_attention", when=_PLAIN),
        LinearSet(linears=_QKV, source=None, parent="self_attention"),
        LinearSet(linears=("self_attention.dense",), source=None, parent="self_attention.dense"),
        LinearSet(linears=_UP, source="post_attention_layernorm", parent="mlp", when=_PLAIN),
        LinearSet(linears=_UP, source=None, parent="mlp"),
        LinearSet(linears=("mlp.dense_4h_to_h",), source=None, parent="mlp.dense_4h_to_h"),
    ),
    native=False,
    norm="layer",
    defaults={"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
    parts=Parts(qkv=_QKV, output="self_attention.dense", up=_UP, gated=False, down="mlp.dense_4h_to_h"),
    biases=Biases(qkv=True, output=True, mlp=True),
    outside={f"transformer.word_embeddings_layernorm.{part}": ("hidden_size",) for part in ("weight", "bias")},
    mlp_ratio=4,
)
