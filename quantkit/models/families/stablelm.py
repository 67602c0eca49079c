"""StableLM: layer norms, a quarter of each head rotated; by switches a norm for every head and a parallel residual."""

from dataclasses import replace

from quantkit.models.family import Biases, Family, Parts, QueryKeyNorm, Rope

_LLAMA = Family().sets
_JOINT = Family(parallel=True, parts=Parts(mlp_norm=None)).sets[0]
_PARALLEL, _IN_TURN = (("use_parallel_residual", True),), (("use_parallel_residual", False),)

FAMILY = Family(
    hf_names=("StableLmForCausalLM",),
    # With a parallel residual one norm feeds both attention and MLP.
    linear_sets=(
        replace(_LLAMA[0], when=_IN_TURN),
        replace(_LLAMA[2], when=_IN_TURN),
        replace(_JOINT, when=_PARALLEL),
        _LLAMA[1],
        _LLAMA[3],
    ),
    parts=Parts(parallel_mlp_norm=False),
    norm="layer",
    qk_norm=QueryKeyNorm(
        over="heads",
        switch="qk_layernorm",
        bias=False,
        query="self_attn.q_layernorm.norms.{head}",
        key="self_attn.k_layernorm.norms.{head}",
    ),
    parallel="use_parallel_residual",
    rope=Rope(partial=0.25),
    defaults={"qk_layernorm": False, "use_parallel_residual": False, "layer_norm_eps": 1e-5},
    biases=Biases(qkv="use_qkv_bias", output=False),
)
