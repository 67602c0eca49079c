"""GPT-NeoX and Pythia: layer norms, parallel residual with two norms, q, k and v interleaved head by head."""

from quantkit.models.family import Biases, Family, Parts, Rope, inside

FAMILY = Family(
    hf_names=("GPTNeoXForCausalLM",),
    **inside("gpt_neox", layers="layers", embedding="embed_in", final_norm="final_layer_norm"),
    stored_head="embed_out",
    parts=Parts(
        qkv=("attention.query_key_value",),
        qkv_by_head=True,
        output="attention.dense",
        up=("mlp.dense_h_to_4h",),
        gated=False,
        down="mlp.dense_4h_to_h",
    ),
    norm="layer",
    parallel="use_parallel_residual",
    rope=Rope(partial=0.25),
    defaults={"use_parallel_residual": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
    biases=Biases(qkv=True, output=True, mlp=True),
)
