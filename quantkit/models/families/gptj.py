"""GPT-J: attention and MLP side by side behind one layer norm."""

from quantkit.models.family import Biases, Family, Parts, Rope, inside

FAMILY = Family(
    hf_names=("GPTJForCausalLM",),
    **inside("transformer", layers="h", embedding="wte", final_norm="ln_f"),
    norm="layer",
    parallel=True,
    parts=Parts(
        input_norm="ln_1",
        mlp_norm=None,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        up=("mlp.fc_in",),
        gated=False,
        down="mlp.fc_out",
    ),
    biases=Biases(qkv=False, output=False, mlp=True, head=True),
    rope=Rope(interleaved=True, width="rotary_dim"),
    keys={
        "intermediate_size": "n_inner",
        "hidden_activation": "activation_function",
        "num_key_value_heads": "n_head",  # each head has its own, whatever else config.json says
    },
    mlp_ratio=4,
    defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "rotary_dim": 64},
)
