"""Bamba: Mamba 2 in most layers, attention with half of each head rotated in those that are listed."""

from quantkit.models.family import Family, Parts, Rope
from quantkit.models.recurrent import MAMBA, MAMBA_DEFAULTS

FAMILY = Family(
    hf_names=("BambaForCausalLM",),
    final_norm="model.final_layernorm",
    parts=Parts(
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    recurrent=MAMBA,
    rope=Rope(partial=0.5),
    defaults={**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
)
