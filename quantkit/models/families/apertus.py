"""Apertus: Llama with an MLP of xIELU without a gate, norms on queries and keys, and names of its own for its norms."""

from quantkit.models.family import Family, Parts, QueryKeyNorm

FAMILY = Family(
    hf_names=("ApertusForCausalLM",),
    native=False,
    parts=Parts(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",), gated=False),
    qk_norm=QueryKeyNorm(),
    vectors={"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)},
)
