"""Seed-OSS: Llama with biases on q, k and v."""

from quantkit.models.family import Family

FAMILY = Family(hf_names=("SeedOssForCausalLM",), native=False)
