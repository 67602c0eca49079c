"""BLOOM, Falcon, MPT and OPT: older families that quantkit quantizes, but whose models transformers runs."""

from quantkit.models.family import Biases, Family, Parts, inside
from quantkit.models.linear_sets import LinearSet

_QKV, _UP = ("self_attention.query_key_value",), ("mlp.dense_h_to_4h",)
_PLAIN = (("apply_residual_connection_post_layernorm", False),)
_OLD_IN_TURN = (("parallel_attn", False), ("new_decoder_architecture", False))
_SEPARATE = Parts().qkv
_BEFORE, _RELU = (("do_layer_norm_before", True),), (("activation_function", "relu"),)

FAMILIES = {
    # BLOOM: ALiBi instead of positions, q, k and v in one projection, a norm after the embedding.
    "bloom": Family(
        hf_names=("BloomForCausalLM",),
        **inside("transformer", layers="h", embedding="word_embeddings", final_norm="ln_f"),
        # If the residual connection starts after the norm, a scale in the norm would change the residual stream.
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
    ),
    # Falcon: q, k and v in one projection; attention and MLP in parallel after one or two norms, or in turn.
    "falcon": Family(
        hf_names=("FalconForCausalLM",),
        **inside("transformer", layers="h", embedding="word_embeddings", final_norm="ln_f"),
        # The first match applies: parallel after two norms, one after the other, or parallel after one norm.
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
    ),
    # MPT: ALiBi, layer norms without bias, q, k and v in one projection.
    "mpt": Family(
        hf_names=("MptForCausalLM", "MPTForCausalLM"),
        **inside("transformer", layers="blocks", embedding="wte", final_norm="norm_f"),
        native=False,
        norm="layer",
        biases=Biases(norms=False),
        parts=Parts(
            input_norm="norm_1",
            mlp_norm="norm_2",
            qkv=("attn.Wqkv",),
            output="attn.out_proj",
            up=("ffn.up_proj",),
            gated=False,
            down="ffn.down_proj",
        ),
        defaults={"tie_word_embeddings": True},
        mlp_ratio=4,
    ),
    # OPT: learned positions, layer norms, biases, ReLU; only the 350M model has its norms after attention and MLP.
    "opt": Family(
        hf_names=("OPTForCausalLM",),
        **inside("model.decoder", layers="layers", embedding="embed_tokens", final_norm="final_layer_norm"),
        linear_sets=(
            LinearSet(linears=_SEPARATE, source="self_attn_layer_norm", parent="self_attn", when=_BEFORE),
            LinearSet(linears=_SEPARATE, source=None, parent="self_attn"),
            LinearSet(linears=("self_attn.out_proj",), source="self_attn.v_proj", parent="self_attn.out_proj"),
            # No module contains the MLP, so its parent is the layer.
            LinearSet(linears=("fc1",), source="final_layer_norm", parent="", when=_BEFORE),
            LinearSet(linears=("fc1",), source=None, parent="fc1"),
            # A positive scale passes through a ReLU.
            LinearSet(linears=("fc2",), source="fc1", parent="fc2", when=_RELU),
            LinearSet(linears=("fc2",), source=None, parent="fc2"),
        ),
        native=False,
        norm="layer",
        defaults={
            "enable_bias": True,
            "do_layer_norm_before": True,
            "activation_function": "relu",
            "tie_word_embeddings": True,
        },
        parts=Parts(
            input_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            output="self_attn.out_proj",
            up=("fc1",),
            gated=False,
            down="fc2",
        ),
        biases=Biases(qkv="enable_bias", output="enable_bias", mlp="enable_bias"),
        outside={
            "model.decoder.embed_positions.weight": ("max_position_embeddings", "hidden_size"),
            "model.decoder.embed_positions.before": (2, "hidden_size"),  # two rows precede the first position
        },
    ),
}
