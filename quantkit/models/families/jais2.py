"""Jais 2: layer norms, biases everywhere, an MLP of squared ReLU without a gate."""

from quantkit.models.family import Family, Parts

FAMILY = Family(
    hf_names=("Jais2ForCausalLM",),
    norm="layer",
    parts=Parts(up=("mlp.up_proj",), gated=False),
    defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
)
