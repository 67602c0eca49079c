"""Helium: Llama with neighbours rotated together."""

from quantkit.models.family import Family

FAMILY = Family(hf_names=("HeliumForCausalLM",), native=False)
