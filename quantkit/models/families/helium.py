"""Helium: Llama with neighbours rotated together."""

from quantkit.models.family import Architecture

ARCHITECTURE = Architecture(hf_names=("HeliumForCausalLM",), native=False)
