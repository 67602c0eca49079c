"""GPT-J: attention and MLP side by side behind one layer norm."""

from quantkit.models.family import Biases, Family, Parts, inside

FAMILY = Family(
    hf_names=("GPTJForCausalLM",),
    **inside("transformer", layers="h", embedding="wte", final_norm="ln_f"),
    native=False,
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
    keys={"intermediate_size": "n_inner"},
    mlp_ratio=4,
)
