"""StableLM: layer norms, a quarter of each head rotated; by switches a norm for every head and a parallel residual."""

from dataclasses import replace

from quantkit.models.family import LLAMA_SETS, PARALLEL_SETS, Biases, Family, Parts, QueryKeyNorm, Rope

_PARALLEL, _IN_TURN = (("use_parallel_residual", True),), (("use_parallel_residual", False),)

FAMILY = Family(
    hf_names=("StableLmForCausalLM",),
    # With a parallel residual one norm feeds both attention and MLP.
    linear_sets=(
        replace(LLAMA_SETS[0], when=_IN_TURN),
        replace(LLAMA_SETS[2], when=_IN_TURN),
        replace(PARALLEL_SETS[0], when=_PARALLEL),
        LLAMA_SETS[1],
        LLAMA_SETS[3],
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
