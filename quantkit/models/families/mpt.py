"""MPT: ALiBi, layer norms without bias, q, k and v in one projection."""

from quantkit.models.family import Biases, Family, LinearSet, Parts

FAMILY = Family(
    hf_names=("MptForCausalLM", "MPTForCausalLM"),
    backbone="transformer",
    layers="transformer.blocks",
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    linear_sets=(
        LinearSet(linears=("attn.Wqkv",), source="norm_1", parent="attn"),
        LinearSet(linears=("attn.out_proj",), source=None, parent="attn.out_proj"),
        LinearSet(linears=("ffn.up_proj",), source="norm_2", parent="ffn"),
        LinearSet(linears=("ffn.down_proj",), source=None, parent="ffn.down_proj"),
    ),
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
