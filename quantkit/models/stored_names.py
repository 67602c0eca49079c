"""Names of tensors in files: those of a model as published, and those of GGUF files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorConversion:
    """Tensors of files out of which a loader makes others: joined, cut or reordered.

    Args:
        sources: names in files.
        targets: shapes by names in the model.
        convert: tensors by names in files -> tensors by names in the model.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, tuple[int, ...]]
    convert: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredNames:
    """Names in files of one model.

    Args:
        tensors: by name in the model, where it is another.
        modules: the same of modules of which further tensors, such as codes and scales, are renamed alike.
        conversions: of what is no tensor of the model by itself.
    """

    tensors: Mapping[str, str]
    modules: Mapping[str, str]
    conversions: tuple[TensorConversion, ...] = ()

    def of(self, name: str) -> str:
        """Return the name of a tensor in files; the name of a module with a dot behind it is that of a module."""
        module, _, leaf = name.rpartition(".")
        stored = self.modules.get(module)
        return self.tensors.get(name) or (name if stored is None else f"{stored}.{leaf}")

    def own(self, names: tuple[str, ...]) -> dict[str, str]:
        """Names in the model by those in a file, the inverse of `of`."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFNames:
    """Names that llama.cpp gives the family; names of tensors follow from the parts.

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
