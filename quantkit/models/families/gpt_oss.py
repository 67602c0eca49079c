"""gpt-oss: attention sinks, a window in every other layer, experts with biases, stored transposed."""

from quantkit.models.family import Biases, Experts, Family, Rope, Window
from quantkit.models.stored_names import GGUF_EXPERTS, GGUF_NUMBERS, GGUFNames

FAMILY = Family(
    hf_names=("GptOssForCausalLM",),
    # The model clamps the outputs of up and adds 1 before the product with the gate, so up cannot absorb down's scale.
    experts=Experts(
        router="mlp.router", transposed=True, interleaved=True, width="intermediate_size", bias=True, smooth_down=False
    ),
    activation="clamped_swiglu",
    compressed_experts=False,
    window=Window(rule="pattern", pattern=2),
    rope=Rope(theta=150_000.0),
    biases=Biases(qkv=True, output=True),
    vectors={"self_attn.sinks": ("num_attention_heads",)},
    sinks="self_attn.sinks",
    defaults={
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    gguf=GGUFNames(
        name="gpt-oss",
        mlp_norm="post_attention_norm",
        numbers={
            **GGUF_NUMBERS,
            **GGUF_EXPERTS,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        is_written=False,
    ),
)
