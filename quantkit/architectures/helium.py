"""Helium: Llama with neighbours rotated together."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("HeliumForCausalLM",), native=False)
