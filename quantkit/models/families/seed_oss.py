"""Seed-OSS: Llama with biases on q, k and v."""

from quantkit.models.family import Biases, Family

_BIASES = Biases(output="attention_out_bias")

FAMILY = Family(hf_names=("SeedOssForCausalLM",), native=False, biases=_BIASES, defaults={"attention_bias": True})
