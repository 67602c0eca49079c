"""Phi-1 and Phi-2: one layer norm before attention and MLP side by side, biases everywhere, no gate."""

from quantkit.models.family import Biases, Family, Parts, QueryKeyNorm, Rope

FAMILY = Family(
    hf_names=("PhiForCausalLM",),
    final_norm="model.final_layernorm",
    parts=Parts(mlp_norm=None, output="self_attn.dense", up=("mlp.fc1",), gated=False, down="mlp.fc2"),
    norm="layer",
    qk_norm=QueryKeyNorm(switch="qk_layernorm", query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
    parallel=True,
    rope=Rope(partial=0.5),
    defaults={"qk_layernorm": False, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    biases=Biases(qkv=True, output=True, mlp=True, head=True),
)
