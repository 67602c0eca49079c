"""gpt-oss: attention sinks, a window in every other layer, experts with biases, stored transposed."""

from quantkit.models.family import LLAMA_SETS, Biases, Experts, Family, LinearSet, Window

FAMILY = Family(
    hf_names=("GptOssForCausalLM",),
    linear_sets=(
        *LLAMA_SETS[:2],
        LinearSet(
            linears=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
            source="post_attention_layernorm",
            parent="mlp",
            beside=("mlp.router",),
        ),
        # Up is clamped and moved by one before it is multiplied: no scale passes.
        LinearSet(linears=("mlp.experts.{expert}.down_proj",), source=None, parent="mlp.experts.{expert}.down_proj"),
    ),
    experts=Experts(router="mlp.router", transposed=True, interleaved=True, width="intermediate_size", bias=True),
    compressed_experts=False,
    native=False,
    window=Window(rule="pattern", pattern=2),
    biases=Biases(qkv=True, output=True),
    vectors={"self_attn.sinks": ("num_attention_heads",)},
)
