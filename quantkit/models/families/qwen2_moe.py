"""Qwen2-MoE: Qwen2 with experts, and one more that every token sees, weighed by a gate of its own."""

from quantkit.models.family import Biases, Experts, Family, Window

EXPERTS = Experts(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
    shared_width="shared_expert_intermediate_size",
)

FAMILY = Family(
    hf_names=("Qwen2MoeForCausalLM",),
    window=Window(rule="even_lower", switch="use_sliding_window"),
    experts=EXPERTS,
    defaults={"max_window_layers": 28, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    biases=Biases(qkv=True),
)
