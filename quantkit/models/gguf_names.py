"""How llama.cpp calls what a family is, for GGUF files; names of tensors follow from the family's parts. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GGUF_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFNames:
    """How llama.cpp calls the family; names of tensors follow from the parts.

    Args:
        name: `general.architecture`.
        interleaved: rows of q and k are reordered, because rotary pairs lie next to each other there.
        numbers: entry after `<name>.` by key of config.json; a key that is missing there is left out.
        rotary: whether there are rotary embeddings.
    Source: llama.cpp `convert_hf_to_gguf.py` and gguf-py `constants.py`, `tensor_mapping.py`.
    """

    name: str
    interleaved: bool = False
    numbers: Mapping[str, str] = field(default_factory=lambda: GGUF_NUMBERS)
    rotary: bool = True
