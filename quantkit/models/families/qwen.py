"""Qwen, and Mellum, which is built like Qwen3-MoE."""

from dataclasses import replace

from quantkit.models.family import Biases, Experts, Family, Parts, QueryKeyNorm, Rope, Window
from quantkit.models.mtp import QWEN_MTP
from quantkit.models.recurrent import Recurrent
from quantkit.models.stored_names import GGUF_EXPERTS, GGUF_NUMBERS, GGUFNames

EXPERTS = Experts(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
    shared_width="shared_expert_intermediate_size",
)
# Qwen3.5 without images: gated delta nets in three of four layers, gated attention in the fourth, norms that add one to
# their weight.
QWEN3_5 = Family(
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
    mtp=QWEN_MTP,
    wrappers=("Qwen3_5ForConditionalGeneration",),
)

FAMILIES = {
    # Qwen2: Llama with biases on q, k and v. Smoothing divides the bias of v by the scale and leaves the others.
    "qwen2": Family(
        hf_names=("Qwen2ForCausalLM",),
        window=Window(rule="upper", switch="use_sliding_window"),
        defaults={"max_window_layers": 28},
        biases=Biases(qkv=True),
        gguf=GGUFNames(name="qwen2"),
    ),
    # Qwen2-MoE: Qwen2 with routed experts and a shared expert, which has its own gate.
    "qwen2-moe": Family(
        hf_names=("Qwen2MoeForCausalLM",),
        window=Window(rule="even_lower", switch="use_sliding_window"),
        experts=EXPERTS,
        defaults={"max_window_layers": 28, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
        biases=Biases(qkv=True),
        gguf=GGUFNames(
            name="qwen2moe",
            numbers={
                **GGUF_NUMBERS,
                **GGUF_EXPERTS,
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            is_written=False,
        ),
    ),
    # Qwen3: Llama with a norm on each query and key head. It follows q and k, so the sets of linears are Llama's.
    "qwen3": Family(
        hf_names=("Qwen3ForCausalLM",),
        qk_norm=QueryKeyNorm(),
        window=Window(rule="upper", switch="use_sliding_window"),
        defaults={"max_window_layers": 28, "head_dim": 128},
        gguf=GGUFNames(name="qwen3"),
    ),
    # Qwen3-MoE: Qwen3 with experts in place of the MLP.
    "qwen3-moe": Family(
        hf_names=("Qwen3MoeForCausalLM",),
        qk_norm=QueryKeyNorm(),
        window=Window(rule="all", switch="use_sliding_window"),
        experts=Experts(),
        defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
        gguf=GGUFNames(
            name="qwen3moe",
            numbers={**GGUF_NUMBERS, **GGUF_EXPERTS},
            fixed={"norm_topk_prob": True},
            is_written=False,
        ),
    ),
    "qwen3-5": QWEN3_5,
    # Qwen3.5-MoE without images: Qwen3.5 with routed experts, whose weights always sum to 1, and a shared expert.
    "qwen3-5-moe": replace(
        QWEN3_5,
        hf_names=("Qwen3_5MoeForCausalLM",),
        model_types=("qwen3_5_moe_text",),
        experts=replace(EXPERTS, normalize=True),
        wrappers=("Qwen3_5MoeForConditionalGeneration",),
    ),
    # Qwen3-Next: Qwen3.5 with fused projections ordered by head, routed experts and a shared expert.
    "qwen3-next": replace(
        QWEN3_5,
        hf_names=("Qwen3NextForCausalLM",),
        model_types=(),
        wrappers=(),
        recurrent=Recurrent(inputs=("in_proj_qkvz",), gates=("in_proj_ba",), by_head=True),
        experts=EXPERTS,
        defaults={**QWEN3_5.defaults, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    ),
    # Mellum 2: Qwen3-MoE with windows and MLPs that config.json lists layer by layer.
    "mellum": Family(
        hf_names=("MellumForCausalLM",),
        qk_norm=QueryKeyNorm(),
        window=Window(rule="none"),
        rope=Rope(theta=500_000.0, local_theta=10_000.0),
        experts=Experts(),
        defaults={
            "head_dim": 128,
            "sliding_window": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
        },
    ),
}
