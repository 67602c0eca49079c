"""Nemotron: layer norms with an offset of one, an MLP of squared ReLU without a gate."""

from quantkit.models.family import LLAMA_SETS, Family, LinearSet, Parts

FAMILY = Family(
    hf_names=("NemotronForCausalLM",),
    linear_sets=(
        LinearSet(linears=LLAMA_SETS[0].linears, source=None, parent="self_attn"),
        LLAMA_SETS[1],
        LinearSet(linears=("mlp.up_proj",), source=None, parent="mlp"),
        LinearSet(linears=("mlp.down_proj",), source=None, parent="mlp.down_proj"),
    ),
    native=False,
    norm="layer",
    norm_offset=1.0,
    parts=Parts(up=("mlp.up_proj",), gated=False),
)
