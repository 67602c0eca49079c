"""Seed-OSS: Llama with biases on q, k and v."""

from quantkit.models.family import Architecture

ARCHITECTURE = Architecture(hf_names=("SeedOssForCausalLM",), native=False)
