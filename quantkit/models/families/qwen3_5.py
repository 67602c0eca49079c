"""Qwen3.5 without images: gated delta nets in three of four layers, gated attention in the fourth, norms near zero."""

from quantkit.models.family import Family, Parts, QueryKeyNorm, Rope, Wrapper
from quantkit.models.recurrent import Recurrent

FAMILY = Family(
    hf_names=("Qwen3_5ForCausalLM",),
    model_types=("qwen3_5_text",),
    parts=Parts(gated_query=True),
    norm_offset=1.0,
    qk_norm=QueryKeyNorm(),
    recurrent=Recurrent(),
    rope=Rope(partial=0.25),
    defaults=(
        {"head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
    ),
    unread=("mtp.",),
    wrapper=Wrapper(hf_names=("Qwen3_5ForConditionalGeneration",)),
)
