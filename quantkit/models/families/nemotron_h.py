"""Nemotron-H: each layer is Mamba 2, attention without positions, an MLP, or experts. MLPs and experts have no gate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.models.family import BALANCED_EXPERTS, Family, Parts, Rope, inside
from quantkit.models.recurrent import MAMBA


def _reads_hidden_states(config: Mapping[str, Any]) -> bool:
    return not config.get("moe_latent_size")


FAMILY = Family(
    hf_names=("NemotronHForCausalLM",),
    **inside("model", layers="layers", embedding="embeddings", final_norm="norm_f"),
    stored_prefix="backbone.",
    # With `moe_latent_size`, two more linears project the experts' input and output; this family does not have them.
    only=_reads_hidden_states,
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
    experts=replace(
        BALANCED_EXPERTS,
        router="mixer.gate",
        up=("mixer.experts.{expert}.up_proj",),
        down="mixer.experts.{expert}.down_proj",
        stacked_up="mixer.experts.up_proj",
        stacked_down="mixer.experts.down_proj",
        gated=False,
        shared_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        shared_width="moe_shared_expert_intermediate_size",
        balance="mixer.gate.e_score_correction_bias",
    ),
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
        least_step="time_step_min",  # transformers applies it to prompts, but not when decoding
    ),
    rope=Rope(layers="named"),
    defaults=(
        {"head_dim": 128, "num_key_value_heads": 8, "mlp_hidden_act": "relu2", "rms_norm_eps": 1e-5, "n_groups": 8}
        | {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "conv_kernel": 4, "use_conv_bias": True}
        | {"time_step_min": 0.001, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
        | {"moe_shared_expert_intermediate_size": 7688}
    ),
    unread=("mtp.",),
)
