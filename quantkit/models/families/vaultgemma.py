"""VaultGemma: Gemma 2 without norms after attention and MLP."""

from dataclasses import replace

from quantkit.models.families.gemma2 import FAMILY as GEMMA2
from quantkit.models.family import Parts

FAMILY = replace(
    GEMMA2,
    hf_names=("VaultGemmaForCausalLM",),
    parts=Parts(mlp_norm="pre_feedforward_layernorm"),
    not_native=(),
    gguf=None,
)
