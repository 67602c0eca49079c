"""OPT: learned positions, layer norms, biases, ReLU; the 350M model alone has its norms behind attention and MLP."""

from quantkit.models.family import Biases, Family, Parts, inside
from quantkit.models.linear_sets import LinearSet

_QKV = Parts().qkv
_BEFORE, _RELU = (("do_layer_norm_before", True),), (("activation_function", "relu"),)

FAMILY = Family(
    hf_names=("OPTForCausalLM",),
    **inside("model.decoder", layers="layers", embedding="embed_tokens", final_norm="final_layer_norm"),
    linear_sets=(
        LinearSet(linears=_QKV, source="self_attn_layer_norm", parent="self_attn", when=_BEFORE),
        LinearSet(linears=_QKV, source=None, parent="self_attn"),
        LinearSet(linears=("self_attn.out_proj",), source="self_attn.v_proj", parent="self_attn.out_proj"),
        # There is no module around the MLP; its output is found in the layer's.
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
        "model.decoder.embed_positions.before": (2, "hidden_size"),  # of the two rows before the first position
    },
)
