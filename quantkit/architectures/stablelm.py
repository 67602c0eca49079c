"""StableLM: layer norms, a quarter of each head rotated; by switches a norm for every head and a parallel residual."""

from quantkit.architectures.base import UNSMOOTHED_SETS, Architecture, Parts, QueryKeyNorm, Rope

ARCHITECTURE = Architecture(
    hf_names=("StableLmForCausalLM",),
    linear_sets=UNSMOOTHED_SETS,  # with a parallel residual one norm feeds both attention and MLP
    parts=Parts(parallel_mlp_norm=False),
    norm="layer",
    qk_norm=QueryKeyNorm(
        over="heads",
        switch="qk_layernorm",
        query="self_attn.q_layernorm.norms.{head}",
        key="self_attn.k_layernorm.norms.{head}",
    ),
    parallel="use_parallel_residual",
    rope=Rope(partial=0.25),
    defaults={"qk_layernorm": False, "use_parallel_residual": False, "layer_norm_eps": 1e-5},
)
