"""Arcee AFM: Llama with an MLP of squared ReLU without a gate."""

from quantkit.models.family import Family, Parts

FAMILY = Family(
    hf_names=("ArceeForCausalLM",),
    parts=Parts(up=("mlp.up_proj",), gated=False),
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
)
