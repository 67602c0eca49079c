"""MPT: ALiBi, layer norms without bias, q, k and v in one projection."""

from quantkit.models.family import Biases, Family, Parts, inside

FAMILY = Family(
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
)
