"""Seed-OSS: Llama with biases on q, k and v."""

from quantkit.models.family import Biases, Family

FAMILY = Family(
    hf_names=("SeedOssForCausalLM",),
    native=False,
    biases=Biases(output="attention_out_bias"),
    defaults={"attention_bias": True},
)
