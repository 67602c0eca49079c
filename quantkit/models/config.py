"""Read and check entries of config.json under all names that model families give them.

The runtime, planning and the GGUF export all read config.json through `ConfigReader`. It checks the type of an entry
on access; error messages give the key and the value.
"""

import math
from collections.abc import Mapping
from typing import Any

from quantkit.errors import ModelError

# Alternative names of entries in all families; the first in config.json applies. `Family.keys` adds a family's own.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "rms_norm_eps": ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "hidden_activation": ("hidden_act",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
    "partial_rotary_factor": ("rotary_pct",),
    "dtype": ("torch_dtype",),
    "rope_parameters": ("rope_scaling",),
    "rope_theta": ("rotary_emb_base",),
    "rope_type": ("type",),
}

# Limits of counts that determine how much is built before any weight is read. Other counts must fit in 32 bits, as
# GGUF requires.
_AT_MOST = {"num_hidden_layers": 10_000, "num_experts": 10_000, "num_nextn_predict_layers": 10_000}


def check_repeats(config: Mapping[str, Any], where: str) -> None:
    """Refuse absurd layer and expert counts in config.json and its sections, before a library builds that many modules.

    Raises:
        ModelError: a count exceeds its limit.
    """
    for entries in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        read = ConfigReader(entries, where=where)
        for key in _AT_MOST:
            if isinstance(read.get(key), int | float) and read.get(key) > _AT_MOST[key]:
                read.count(key)


class NotNative(ModelError):
    """The model needs a computation that quantkit's own layers lack; transformers may support the model.

    Args:
        what: the unsupported computation, e.g. a config.json key and its value.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"config.json: {what} is not supported by quantkit's own layers; use backend='transformers'")


class ConfigReader:
    """Entries of config.json, or of the language model in it, with the family's defaults for missing keys.

    A null counts as absent but does not select the family's default: `attn_logit_softcapping: null` means no capping.

    Args:
        config: contents of config.json; entries of `text_config` take precedence over top-level entries.
        defaults: values of missing keys.
        keys: the family's own names for entries, keyed by common name.
        where: name of the file in messages.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        keys: Mapping[str, str] | None = None,
        where: str = "config.json",
    ) -> None:
        inner = config.get("text_config")
        self.is_wrapped = isinstance(inner, Mapping)  # in a multimodal model, a section describes the language model
        self.entries: Mapping[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else config
        self._defaults, self._keys, self.where = defaults or {}, keys or {}, where

    def get(self, key: str) -> Any:
        """Return the first non-null value under any name of the key, else its default, else None.

        The family's own name takes precedence even if its value is null: GPT-2 reads `n_inner`, never a stray
        `intermediate_size`.
        """
        if self._keys.get(key) in self.entries:
            return self.entries[self._keys[key]]
        names = self._names(key)
        value = next((self.entries[name] for name in names if self.entries.get(name) is not None), None)
        if value is not None or any(name in self.entries for name in names):
            return value
        return next((self._defaults[name] for name in names if name in self._defaults), None)

    def count(self, key: str, *, default: int | None = None, at_least: int = 1) -> int:
        """Return a whole number.

        Raises:
            ModelError: the entry has no default and is missing, or is not a whole number, or is too small or too large.
        """
        value, at_most = self._required(key, default), _AT_MOST.get(key, (1 << 32) - 1)
        # Not isinstance, which accepts JSON's `true` as the integer 1.
        if type(value) is not int or value < at_least:
            raise self._wrong(key, value, f"a whole number of at least {at_least}")
        if value > at_most:
            raise self._wrong(key, value, f"a whole number of at most {at_most}")
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a whole number of at least zero, or None if the entry is absent."""
        return None if self.get(key) is None else self.count(key, at_least=0)

    def number(self, key: str | None, *, default: float | None = None) -> float:
        """Return a finite number; if the key is None, return the default, because the family has no such entry.

        Raises:
            ModelError: the entry has no default and is missing, or is not a finite number.
        """
        value = default if key is None else self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(key or "", value, "a finite number")
        return float(value)

    def positive(self, key: str | None, *, default: float) -> float:
        """Return a finite number above zero; see `number`."""
        value = self.number(key, default=default)
        if value <= 0:
            raise self._wrong(key or "", value, "a number above zero")
        return value

    def optional_number(self, key: str | None) -> float | None:
        """Return a finite number, or None if the entry is absent."""
        return None if key is None or self.get(key) is None else self.number(key)

    def flag(self, key: str | bool | None, default: bool = False) -> bool:
        """Return whether an entry is true. If `key` is a bool, return it; if `key` is None, return the default."""
        if not isinstance(key, str):
            return default if key is None else key
        value = self.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, *, default: str) -> str:
        """Return a string.

        Raises:
            ModelError: the entry is not a string.
        """
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of this many finite numbers.

        Raises:
            ModelError: the entry is missing or is not such a list.
        """
        value = self._required(key, None)
        if not isinstance(value, list) or len(value) != count:
            size = f" of {len(value)}" if isinstance(value, list) else ""
            raise ModelError(f"{self.where}: {key} is a {type(value).__name__}{size}, not a list of {count} numbers")
        return tuple(ConfigReader({key: item}, where=self.where).number(key) for item in value)

    def _names(self, key: str) -> tuple[str, ...]:
        own = (self._keys[key],) if key in self._keys else ()
        return (*own, key, *ALIASES.get(key, ()))

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ModelError(f"{self.where}: {key!r} is missing; add it, or download the original config.json again")
        return default if value is None else value

    def _wrong(self, key: str, value: Any, expected: str) -> ModelError:
        name = next((name for name in self._names(key) if self.entries.get(name) is not None), key)
        return ModelError(f"{self.where}: {name} is {value!r}, not {expected}; correct it")
