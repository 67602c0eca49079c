"""CodeGen: GPT-J with q, k and v in one projection."""

from dataclasses import replace

from quantkit.models.families.gptj import FAMILY as GPTJ
from quantkit.models.family import Family

FAMILY = Family(
    hf_names=("CodeGenForCausalLM",),
    backbone="transformer",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    native=False,
    norm="layer",
    parallel=True,
    parts=replace(GPTJ.parts, qkv=("attn.qkv_proj",)),
    biases=GPTJ.biases,
    mlp_ratio=4,
)
