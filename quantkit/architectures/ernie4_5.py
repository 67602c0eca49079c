"""ERNIE 4.5, dense: Llama with neighbours rotated together."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("Ernie4_5ForCausalLM",), native=False)
