"""StarCoder2: layer norms, biases everywhere, an MLP without a gate, an optional sliding window."""

from quantkit.models.family import Biases, Family, Parts, Window

FAMILY = Family(
    hf_names=("Starcoder2ForCausalLM",),
    parts=Parts(up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
    norm="layer",
    window=Window(rule="all"),
    defaults={"use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    biases=Biases(qkv="use_bias", output="use_bias", mlp="use_bias"),
)
