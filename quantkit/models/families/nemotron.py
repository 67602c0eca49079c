"""Nemotron: layer norms with an offset of one, half of each head rotated, an MLP of squared ReLU without a gate."""

from quantkit.models.family import Family, Parts, Rope

FAMILY = Family(
    hf_names=("NemotronForCausalLM",),
    norm="layer",
    norm_offset=1.0,
    rope=Rope(partial=0.5),
    parts=Parts(up=("mlp.up_proj",), gated=False),
    defaults={"hidden_act": "relu2", "norm_eps": 1e-5},
)
