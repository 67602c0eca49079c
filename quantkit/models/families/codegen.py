"""CodeGen: GPT-J with q, k and v in one projection."""

from dataclasses import replace

from quantkit.models.families.gptj import FAMILY as GPTJ
from quantkit.models.family import Family, LinearSet

FAMILY = Family(
    hf_names=("CodeGenForCausalLM",),
    backbone="transformer",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    linear_sets=(
        LinearSet(linears=("attn.qkv_proj", "mlp.fc_in"), source="ln_1", parent=""),
        LinearSet(linears=("attn.out_proj",), source=None, parent="attn.out_proj"),
        LinearSet(linears=("mlp.fc_out",), source=None, parent="mlp.fc_out"),
    ),
    native=False,
    norm="layer",
    parallel=True,
    parts=replace(GPTJ.parts, qkv=("attn.qkv_proj",)),
    biases=GPTJ.biases,
    mlp_ratio=4,
)
