"""HunYuan with experts in every layer, and beside them an MLP that every token passes."""

from dataclasses import replace

from quantkit.models.families.hunyuan import FAMILY as HUNYUAN
from quantkit.models.family import Experts

FAMILY = replace(
    HUNYUAN,
    hf_names=("HunYuanMoEV1ForCausalLM",),
    model_types=("hunyuan_v1_moe",),
    experts=Experts(
        router="mlp.gate.wg",
        width="intermediate_size",
        normalize=True,
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
        shared_width="intermediate_size",
        exact=True,
    ),
    keys={"num_experts_per_tok": "moe_topk"},
    defaults={**HUNYUAN.defaults, "num_experts": 1, "moe_topk": 1},
)
