"""SmolLM3: Llama where every fourth layer does without positions."""

from quantkit.models.family import Family, Rope, Window

FAMILY = Family(
    hf_names=("SmolLM3ForCausalLM",),
    window=Window(rule="none", switch="use_sliding_window"),
    rope=Rope(theta=2_000_000.0, layers="listed"),
    defaults={"no_rope_layer_interval": 4, "tie_word_embeddings": True},
)
