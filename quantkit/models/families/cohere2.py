"""Cohere Command R7B and A: Cohere where three layers of four have a window, and only those have positions."""

from quantkit.models.family import Biases, Family, Multipliers, Parts, Rope, Window

FAMILY = Family(
    hf_names=("Cohere2ForCausalLM",),
    parts=Parts(mlp_norm=None),
    norm="layer",
    parallel=True,
    window=Window(rule="pattern", pattern=4),
    rope=Rope(interleaved=True, layers="window"),
    multipliers=Multipliers(logits="logit_scale"),
    defaults={"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "sliding_window": 4096, "tie_word_embeddings": True},
    biases=Biases(norms=False),
)
