"""Youtu: the latent attention of DeepSeek-V3 with an MLP."""

from quantkit.models.families.deepseek_v2 import SIZES
from quantkit.models.family import Family, Rope

FAMILY = Family(
    hf_names=("YoutuForCausalLM",),
    latent=True,
    rope=Rope(interleaved="rope_interleave"),
    defaults={**SIZES, "tie_word_embeddings": True},
)
