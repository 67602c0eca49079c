"""CodeGen: GPT-J with q, v and k in one projection, a quarter of each after another, as on four devices."""

from dataclasses import replace

from quantkit.models.families.gptj import FAMILY as GPTJ

FAMILY = replace(
    GPTJ, hf_names=("CodeGenForCausalLM",), parts=replace(GPTJ.parts, qkv=("attn.qkv_proj",), qkv_blocks=4)
)
