"""Phi-1 and Phi-2: one layer norm before attention and MLP side by side, biases everywhere, no gate."""

from quantkit.models.family import Biases, Family, LinearSet, Parts, QueryKeyNorm, Rope

FAMILY = Family(
    hf_names=("PhiForCausalLM",),
    final_norm="model.final_layernorm",
    linear_sets=(
        LinearSet(
            linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"),
            source="input_layernorm",
            parent="",
        ),
        LinearSet(
            linears=("self_attn.dense",), source="self_attn.v_proj", parent="self_attn.dense", grouped_heads=True
        ),
        LinearSet(linears=("mlp.fc2",), source=None, parent="mlp.fc2"),
    ),
    parts=Parts(mlp_norm=None, output="self_attn.dense", up=("mlp.fc1",), gated=False, down="mlp.fc2"),
    norm="layer",
    qk_norm=QueryKeyNorm(switch="qk_layernorm", query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
    parallel=True,
    rope=Rope(partial=0.5),
    defaults={"qk_layernorm": False, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    biases=Biases(qkv=True, output=True, mlp=True, head=True),
)
