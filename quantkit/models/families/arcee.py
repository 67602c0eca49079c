"""Arcee AFM: Llama with an MLP of squared ReLU without a gate."""

from quantkit.models.family import LLAMA_SETS, Family, LinearSet, Parts

FAMILY = Family(
    hf_names=("ArceeForCausalLM",),
    linear_sets=(
        *LLAMA_SETS[:2],
        LinearSet(linears=("mlp.up_proj",), source="post_attention_layernorm", parent="mlp"),
        LinearSet(linears=("mlp.down_proj",), source=None, parent="mlp.down_proj"),
    ),
    native=False,
    parts=Parts(up=("mlp.up_proj",), gated=False),
)
