"""Seed-OSS: Llama with biases on q, k and v."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("SeedOssForCausalLM",), native=False)
