"""Cohere Command R: attention and MLP side by side behind one norm without bias, neighbours rotated together."""

from quantkit.models.family import Biases, Family, Multipliers, Parts, QueryKeyNorm, Rope

FAMILY = Family(
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
