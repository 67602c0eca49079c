"""StarCoder2: layer norms, biases everywhere, an MLP without a gate, an optional sliding window."""

from quantkit.models.family import LLAMA_SETS, Biases, Family, LinearSet, Parts, Window

FAMILY = Family(
    hf_names=("Starcoder2ForCausalLM",),
    linear_sets=(
        *LLAMA_SETS[:2],
        LinearSet(linears=("mlp.c_fc",), source="post_attention_layernorm", parent="mlp"),
        # Between c_fc and c_proj stands a GELU, which no scale passes through.
        LinearSet(linears=("mlp.c_proj",), source=None, parent="mlp.c_proj"),
    ),
    parts=Parts(up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
    norm="layer",
    window=Window(rule="all"),
    defaults={"use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    biases=Biases(qkv="use_bias", output="use_bias", mlp="use_bias"),
)
