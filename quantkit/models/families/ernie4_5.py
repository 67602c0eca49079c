"""ERNIE 4.5, dense: Llama with neighbours rotated together."""

from quantkit.models.family import Family

FAMILY = Family(hf_names=("Ernie4_5ForCausalLM",), native=False)
