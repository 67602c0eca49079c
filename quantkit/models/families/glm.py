"""GLM-4 (first series): Llama with half of each head rotated in neighbouring pairs, gate and up in one."""

from quantkit.models.family import Biases, Family, Parts, Rope

FAMILY = Family(
    hf_names=("GlmForCausalLM",),
    parts=Parts(up=("mlp.gate_up_proj",)),
    rope=Rope(partial=0.5, interleaved=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-07},
    biases=Biases(output=False),
)
