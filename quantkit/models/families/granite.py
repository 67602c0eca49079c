"""Granite: Llama with constants on embeddings, attention, residual stream and logits."""

from quantkit.models.family import Family, Multipliers

FAMILY = Family(
    hf_names=("GraniteForCausalLM",),
    multipliers=Multipliers(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    defaults=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
    ),
)
