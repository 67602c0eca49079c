"""gpt-oss: attention sinks, a window in every other layer, experts with biases, stored transposed."""

from quantkit.models.family import Biases, Experts, Family, Window

FAMILY = Family(
    hf_names=("GptOssForCausalLM",),
    # The up outputs are clamped and get one added before the product, so no scale passes through to down.
    experts=Experts(
        router="mlp.router", transposed=True, interleaved=True, width="intermediate_size", bias=True, smooth_down=False
    ),
    compressed_experts=False,
    native=False,
    window=Window(rule="pattern", pattern=2),
    biases=Biases(qkv=True, output=True),
    vectors={"self_attn.sinks": ("num_attention_heads",)},
)
