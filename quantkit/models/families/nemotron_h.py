"""Nemotron-H: each layer is Mamba 2, attention without positions, or an MLP without a gate; no experts."""

from dataclasses import replace

from quantkit.models.family import Family, Parts, Rope, inside
from quantkit.models.recurrent import MAMBA

_TYPES = ("layers_block_type", "hybrid_override_pattern")

FAMILY = Family(
    hf_names=("NemotronHForCausalLM",),
    **inside("model", layers="layers", embedding="embeddings", final_norm="norm_f"),
    stored_prefix="backbone.",
    # Experts are chosen in a way of their own, and have no gate.
    only=lambda config: not any("moe" in (types := config.get(key) or "") or "E" in types for key in _TYPES),
    keys={"layer_types": "layers_block_type", "hidden_activation": "mlp_hidden_act"},
    parts=Parts(
        input_norm="norm",
        mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        up=("mixer.up_proj",),
        gated=False,
        down="mixer.down_proj",
    ),
    one_half=True,
    recurrent=replace(
        MAMBA,
        module="mixer",
        key_heads="n_groups",
        key_dim="ssm_state_size",
        value_heads="mamba_num_heads",
        value_dim="mamba_head_dim",
        conv_width="conv_kernel",
        conv_bias="use_conv_bias",
        bias="use_bias",
        norm_groups="n_groups",
        activation="mamba_hidden_act",
        least_step="time_step_min",  # which transformers applies to prompts, and forgets when it decodes
    ),
    rope=Rope(layers="named"),
    defaults=(
        {"head_dim": 128, "num_key_value_heads": 8, "mlp_hidden_act": "relu2", "rms_norm_eps": 1e-5, "n_groups": 8}
        | {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "conv_kernel": 4, "use_conv_bias": True}
        | {"time_step_min": 0.001}
    ),
    unread=("mtp.",),
)
