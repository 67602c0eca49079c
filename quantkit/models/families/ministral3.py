"""Ministral 3: Mistral whose queries grow with the logarithm of their position."""

from dataclasses import replace

from quantkit.models.families.mistral import FAMILY as MISTRAL
from quantkit.models.family import Rope

FAMILY = replace(
    MISTRAL,
    hf_names=("Ministral3ForCausalLM",),
    rope=Rope(theta=1_000_000.0, grows=True),
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    gguf=None,
)
