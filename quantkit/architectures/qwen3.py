"""Qwen3: Llama with a norm on each query and key head, which sits behind q and k and so changes nothing here."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("Qwen3ForCausalLM",))
