"""Seed-OSS: Llama with biases on q, k and v."""

from quantkit.models.family import Biases, Family

FAMILY = Family(
    hf_names=("SeedOssForCausalLM",),
    biases=Biases(output="attention_out_bias"),
    defaults={"attention_bias": True, "head_dim": 128},
)
