"""Qwen3-Next: gated delta nets whose projections take turns head by head, experts beside one that every token sees."""

from dataclasses import replace

from quantkit.models.families.qwen2_moe import EXPERTS
from quantkit.models.families.qwen3_5 import FAMILY as QWEN3_5
from quantkit.models.recurrent import Recurrent

FAMILY = replace(
    QWEN3_5,
    hf_names=("Qwen3NextForCausalLM",),
    model_types=(),
    wrapper=None,
    recurrent=Recurrent(inputs=("in_proj_qkvz",), gates=("in_proj_ba",), by_head=True),
    experts=EXPERTS,
    defaults={**QWEN3_5.defaults, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()},
)
