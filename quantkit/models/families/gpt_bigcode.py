"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with ordinary linears and one key/value head."""

from dataclasses import replace

from quantkit.models.families.gpt2 import FAMILY as GPT2

FAMILY = replace(
    GPT2,
    hf_names=("GPTBigCodeForCausalLM",),
    transposed=(),
    decode_at_load=True,
    multi_query="multi_query",
    defaults={**GPT2.defaults, "multi_query": True},
    gguf=None,
)
