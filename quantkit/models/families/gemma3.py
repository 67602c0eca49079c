"""Gemma 3, text only: Gemma 2 with norms on queries and keys, and two wavelengths: one for layers with a window."""

from dataclasses import replace

from quantkit.models.families.gemma2 import DEFAULTS, GGUF
from quantkit.models.families.gemma2 import FAMILY as GEMMA2
from quantkit.models.family import QueryKeyNorm, Rope, Window

FAMILY = replace(
    GEMMA2,
    hf_names=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    qk_norm=QueryKeyNorm(),
    window=Window(rule="pattern", pattern=6),
    rope=Rope(theta=1_000_000.0, local_theta=10_000.0),
    defaults=DEFAULTS,  # softcaps only where config.json has them
    gguf=replace(GGUF, name="gemma3"),
)
