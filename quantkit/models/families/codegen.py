"""CodeGen: GPT-J with q, k and v in one projection."""

from dataclasses import replace

from quantkit.models.families.gptj import FAMILY as GPTJ

FAMILY = replace(GPTJ, hf_names=("CodeGenForCausalLM",), parts=replace(GPTJ.parts, qkv=("attn.qkv_proj",)))
