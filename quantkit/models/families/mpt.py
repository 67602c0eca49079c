"""MPT: ALiBi, layer norms without bias, q, k and v in one projection."""

from quantkit.models.family import Biases, Family, Parts

FAMILY = Family(
    hf_names=("MptForCausalLM", "MPTForCausalLM"),
    backbone="transformer",
    layers="transformer.blocks",
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    native=False,
    norm="layer",
    defaults={"tie_word_embeddings": True},
    parts=Parts(
        input_norm="norm_1",
        mlp_norm="norm_2",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        up=("ffn.up_proj",),
        gated=False,
        down="ffn.down_proj",
    ),
    biases=Biases(norms=False),
    mlp_ratio=4,
)
