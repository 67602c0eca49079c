"""Names of a model's tensors in published checkpoints and in GGUF files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorConversion:
    """Conversion of stored tensors to the model's tensors by joining, splitting or reordering.

    Args:
        sources: names in files.
        targets: shapes of the converted tensors, keyed by name in the model.
        convert: function from tensors keyed by name in files to tensors keyed by name in the model.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, tuple[int, ...]]
    convert: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredNames:
    """Names of one model's tensors in files.

    Args:
        tensors: a tensor's name in files, keyed by its name in the model, for tensors whose two names differ.
        modules: a module's name in files, keyed by its name in the model; applies to all tensors of the module, such as
            codes and scales.
        conversions: conversions of stored tensors that do not correspond one-to-one to tensors of the model.
    """

    tensors: Mapping[str, str]
    modules: Mapping[str, str]
    conversions: tuple[TensorConversion, ...] = ()

    def of(self, name: str) -> str:
        """Return the name in files of a tensor, or of a module if `name` is the module's name with a trailing dot."""
        module, _, leaf = name.rpartition(".")
        stored = self.modules.get(module)
        return self.tensors.get(name) or (name if stored is None else f"{stored}.{leaf}")

    def own(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the name in the model of each tensor, keyed by its name in files; the inverse of `of`."""
        tensors = {stored: name for name, stored in self.tensors.items()}
        modules = {stored: name for name, stored in self.modules.items()}
        own: dict[str, str] = {}
        for name in names:
            module, _, leaf = name.rpartition(".")
            own[name] = tensors.get(name) or (f"{modules[module]}.{leaf}" if module in modules else name)
        return own


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
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFNames:
    """llama.cpp's names for a family; tensor names follow from `Family.parts`, see `gguf_names`.

    Args:
        name: value of `general.architecture` in GGUF files.
        interleaved: whether rows of q and k are reordered, because llama.cpp rotates neighbouring channels as a pair.
        numbers: maps the key of each GGUF entry, without `<name>.`, to a config.json key. Entries without a value are
            left out.
        rotary: whether the model has rotary embeddings.
        mlp_norm: GGUF name of the norm before the MLP.
        fixed: entries of config.json that follow from the architecture, e.g. a `model_type` other than the family's.
        is_written: whether quantkit can write GGUF files of this family; it can always read them.
    Source: llama.cpp `convert_hf_to_gguf.py` and gguf-py `constants.py`, `tensor_mapping.py`.
    """

    name: str
    interleaved: bool = False
    numbers: Mapping[str, str] = field(default_factory=lambda: GGUF_NUMBERS)
    rotary: bool = True
    mlp_norm: str = "ffn_norm"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_written: bool = True
