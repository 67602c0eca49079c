"""GPT-2: learned positions, layer norms, biases everywhere; its linears are stored transposed."""

from quantkit.models.family import Biases, Family, Parts, inside
from quantkit.models.gguf_names import GGUF_NUMBERS, GGUFNames

_NUMBERS = {
    key.replace("layer_norm_rms", "layer_norm"): entry
    for key, entry in GGUF_NUMBERS.items()
    if entry != "num_key_value_heads"
}

FAMILY = Family(
    hf_names=("GPT2LMHeadModel",),
    **inside("transformer", layers="h", embedding="wte", final_norm="ln_f"),
    parts=Parts(
        input_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
    ),
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    native=False,
    norm="layer",
    defaults={"tie_word_embeddings": True},
    biases=Biases(qkv=True, output=True, mlp=True),
    outside={"transformer.wpe.weight": ("max_position_embeddings", "hidden_size")},
    keys={"intermediate_size": "n_inner"},
    mlp_ratio=4,
    gguf=GGUFNames(name="gpt2", numbers=_NUMBERS, rotary=False),
)
