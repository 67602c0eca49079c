"""ERNIE 4.5, dense: Llama with neighbours rotated together."""

from quantkit.models.family import Biases, Family

_BIASES = Biases(qkv="use_bias", output="use_bias", mlp="use_bias")

FAMILY = Family(hf_names=("Ernie4_5ForCausalLM",), native=False, biases=_BIASES, defaults={"tie_word_embeddings": True})
