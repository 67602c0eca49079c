"""Cohere Command R7B and A: Cohere where three layers of four have a window, and only those have positions."""

from dataclasses import replace

from quantkit.models.families.cohere import FAMILY as COHERE
from quantkit.models.family import Rope, Window

FAMILY = replace(
    COHERE,
    hf_names=("Cohere2ForCausalLM",),
    qk_norm=None,
    window=Window(rule="pattern", pattern=4),
    rope=Rope(interleaved=True, layers="window"),
    defaults={**COHERE.defaults, "sliding_window": 4096},
)
