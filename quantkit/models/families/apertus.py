"""Apertus: Llama with an MLP of xIELU without a gate, norms on queries and keys, and names of its own for its norms."""

from quantkit.models.family import LLAMA_SETS, Family, LinearSet, Parts, QueryKeyNorm

FAMILY = Family(
    hf_names=("ApertusForCausalLM",),
    linear_sets=(
        LinearSet(linears=LLAMA_SETS[0].linears, source="attention_layernorm", parent="self_attn"),
        LLAMA_SETS[1],
        LinearSet(linears=("mlp.up_proj",), source="feedforward_layernorm", parent="mlp"),
        LinearSet(linears=("mlp.down_proj",), source=None, parent="mlp.down_proj"),
    ),
    native=False,
    parts=Parts(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",), gated=False),
    qk_norm=QueryKeyNorm(),
    vectors={"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)},
)
