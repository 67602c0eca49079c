"""ERNIE 4.5, dense: Llama with neighbours rotated together."""

from quantkit.models.family import Biases, Family, Rope

FAMILY = Family(
    hf_names=("Ernie4_5ForCausalLM",),
    biases=Biases(qkv="use_bias", output="use_bias", mlp="use_bias"),
    rope=Rope(theta=500_000.0, interleaved=True),
    defaults={"tie_word_embeddings": True, "head_dim": 128, "rms_norm_eps": 1e-5},
)
