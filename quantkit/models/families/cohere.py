"""Cohere: attention and MLP run in parallel after one norm."""

from dataclasses import replace

from quantkit.models.family import Biases, Family, Multipliers, Parts, QueryKeyNorm, Rope, Window

# Cohere Command R: attention and MLP in parallel after one norm without bias; RoPE pairs neighbouring channels.
COHERE = Family(
    hf_names=("CohereForCausalLM",),
    parts=Parts(mlp_norm=None),
    norm="layer",
    qk_norm=QueryKeyNorm(over="heads", switch="use_qk_norm"),
    parallel=True,
    rope=Rope(theta=500_000.0, interleaved=True),
    multipliers=Multipliers(logits="logit_scale"),
    defaults={"use_qk_norm": False, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    biases=Biases(norms=False),
)

FAMILIES = {
    "cohere": COHERE,
    # Cohere Command R7B and A: Cohere with a window in three of four layers, and positions only in these layers.
    "cohere2": replace(
        COHERE,
        hf_names=("Cohere2ForCausalLM",),
        qk_norm=None,
        window=Window(rule="pattern", pattern=4),
        rope=Rope(interleaved=True, layers="window"),
        defaults={**COHERE.defaults, "sliding_window": 4096},
    ),
}
