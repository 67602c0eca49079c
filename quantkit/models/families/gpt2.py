"""GPT-2: learned positions, layer norms, biases everywhere; its linears are stored transposed."""

from quantkit.models.family import Biases, Family, GGUFNames, Parts

FAMILY = Family(
    hf_names=("GPT2LMHeadModel",),
    backbone="transformer",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    native=False,
    norm="layer",
    defaults={"tie_word_embeddings": True},
    parts=Parts(
        input_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
    ),
    biases=Biases(qkv=True, output=True, mlp=True),
    outside={"transformer.wpe.weight": ("max_position_embeddings", "hidden_size")},
    mlp_ratio=4,
    gguf=GGUFNames(
        name="gpt2",
        numbers={
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.layer_norm_epsilon": "rms_norm_eps",
            "vocab_size": "vocab_size",
        },
        rotary=False,
    ),
)
