"""Granite: Llama with constants on embeddings, attention, residual stream and logits."""

from quantkit.models.family import Family, Multipliers

_CONSTANTS = {
    "embedding": "embedding_multiplier",
    "residual": "residual_multiplier",
    "attention": "attention_multiplier",
    "logits_divisor": "logits_scaling",
}

FAMILY = Family(
    hf_names=("GraniteForCausalLM",),
    multipliers=Multipliers(**_CONSTANTS),
    defaults=dict.fromkeys(_CONSTANTS.values(), 1.0),
)
