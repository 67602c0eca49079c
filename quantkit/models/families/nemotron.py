"""Nemotron: layer norms with an offset of one, an MLP of squared ReLU without a gate."""

from quantkit.models.family import Family, Parts

FAMILY = Family(
    hf_names=("NemotronForCausalLM",),
    native=False,
    norm="layer",
    norm_offset=1.0,
    parts=Parts(up=("mlp.up_proj",), gated=False),
)
