"""Gemma: norms that add one to their weight, embeddings times the root of the width, heads wider than their share."""

from quantkit.models.family import Family, Multipliers
from quantkit.models.gguf_names import GGUFNames

FAMILY = Family(
    hf_names=("GemmaForCausalLM",),
    norm_offset=1.0,
    multipliers=Multipliers(root_embedding=True),
    activation="gelu_pytorch_tanh",  # released configs say "gelu" and mean its approximation
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    not_native=("use_bidirectional_attention",),
    gguf=GGUFNames(name="gemma"),
)
