"""GPT-2: learned positions, layer norms, biases everywhere; its linears are stored transposed."""

from quantkit.models.family import Family, LinearSet

FAMILY = Family(
    hf_names=("GPT2LMHeadModel",),
    backbone="transformer",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    linear_sets=(
        LinearSet(linears=("attn.c_attn",), source="ln_1", parent="attn"),
        LinearSet(linears=("attn.c_proj",), source=None, parent="attn.c_proj"),
        LinearSet(linears=("mlp.c_fc",), source="ln_2", parent="mlp"),
        LinearSet(linears=("mlp.c_proj",), source=None, parent="mlp.c_proj"),
    ),
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    native=False,
    norm="layer",
    defaults={"tie_word_embeddings": True},
)
