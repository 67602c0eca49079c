"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with ordinary linears and one key/value head."""

from quantkit.architectures.base import Architecture, LinearSet

ARCHITECTURE = Architecture(
    hf_names=("GPTBigCodeForCausalLM",),
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
    decode_at_load=True,
    native=False,
    norm="layer",
    defaults={"tie_word_embeddings": True},
)
