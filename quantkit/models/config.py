"""Read and check entries of config.json under all names that model families give them.

The runtime, planning and the GGUF export all read config.json through `ConfigReader`. It checks the type of an entry
on access; error messages give the key and the value.

The `*_by_layer` functions return which layers of a model have windows, states, experts and rotary positions. Lists in
config.json determine this; without a list, the family's rule applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import ModelError
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.safety.untrusted import shorten

if TYPE_CHECKING:
    from quantkit.models.family import Family

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

_FULL = ("full_attention", "attention", "global_attention", "indexed_attention")
# For each layer type with a window: the key of the window's size.
_WINDOWED = {
    "sliding_attention": "sliding_window",
    "local_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
# Layer types by letter of hybrid_override_pattern.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# Model types whose layers keep a state.
_STATE_SPACE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2")


def check_repeats(config: Mapping[str, Any], where: str) -> None:
    """Refuse implausible layer and expert counts in config.json, before a library builds that many modules.

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
        """Return whether an entry is true. If `key` is a bool, return this bool; if it is None, return the default."""
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


def count_layers(read: ConfigReader) -> int:
    """Return the number of decoder layers: `num_hidden_layers`, or else the length of the list of layer types."""
    types = _types(read)
    return read.count("num_hidden_layers", default=len(types) if isinstance(types, list) else None)


def _types(read: ConfigReader) -> Any:
    """Return the entry of config.json that lists a type per layer; None if there is no such entry."""
    pattern = read.get("hybrid_override_pattern")
    if read.get("layer_types") is None and isinstance(pattern, str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    return read.get("layer_types")


def halves_by_layer(read: ConfigReader, family: Family) -> tuple[bool, ...]:
    """Return for each layer whether it has no attention, only an MLP or experts; see `Family.one_half`."""
    count = count_layers(read)
    if not family.one_half:
        return (False,) * count
    return tuple(name in ("mlp", "moe") for name in _checked_types(read, _types(read), count))


def windows_by_layer(read: ConfigReader, family: Family) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None = the layer attends to all tokens.

    Raises:
        ModelError: a layer type is not supported, or config.json does not list one type per layer.
    """
    count = count_layers(read)
    if family.block is not None:
        shapes = [family.block(read, index).attention for index in range(count)]
        return tuple(s.window if isinstance(s, AttentionShape) and s.kind == "window" else None for s in shapes)
    model_type = read.get("model_type")
    if family.recurrent is None and (model_type in _STATE_SPACE or read.flag("is_attention_free")):
        raise ModelError(
            f"{read.where}: layers of {model_type} keep a state instead of keys and values, but plan supports only "
            "attention layers; give --params to plan the weights alone"
        )
    rule, types = family.window, _types(read)
    if types is not None and (rule is None or rule.rule != "all"):
        names, recurrent = _checked_types(read, types, count), recurrent_by_layer(read, family)
        others = zip(names, recurrent, halves_by_layer(read, family), strict=True)
        return tuple(None if has_state or is_mlp else _window_of_type(read, name) for name, has_state, is_mlp in others)
    pattern = read.optional_count("sliding_window_pattern")
    if rule is None or not (pattern or read.flag(rule.switch, rule.switch is None)) or not read.get("sliding_window"):
        return (None,) * count
    size = read.count("sliding_window")
    bound = read.count("max_window_layers", default=count, at_least=0)

    def windowed(index: int) -> bool:
        if rule.rule == "pattern" or pattern:
            # In each group of n layers, the last one (or the first) attends to all tokens.
            return (index + (0 if rule.first else 1)) % (pattern or rule.pattern) != 0
        if rule.rule == "upper":
            return index >= bound
        if rule.rule == "even_lower":
            return index < bound and index % 2 == 0
        return rule.rule in ("all", "listed")

    return tuple(size if windowed(index) else None for index in range(count))


def _checked_types(read: ConfigReader, types: Any, count: int) -> list[str]:
    names = [str(item) for item in types[:count]] if isinstance(types, list) else []
    if len(names) != count:
        raise ModelError(
            f"{read.where}: layer_types has {len(names)} entries; expected one (full_attention or sliding_attention) "
            f"for each of the {count} layers; correct it"
        )
    return names


def _window_of_type(read: ConfigReader, name: str) -> int | None:
    if name in _FULL:
        return None
    if name not in _WINDOWED:
        raise ModelError(
            f"{read.where}: plan does not support layer type {name!r}; supported: full, sliding, chunked and "
            "compressed attention. Give --params to plan the weights alone"
        )
    return read.count(_WINDOWED[name])


def recurrent_by_layer(read: ConfigReader, family: Family) -> tuple[bool, ...]:
    """Return for each layer whether it keeps a state instead of keys and values."""
    count, data, types = count_layers(read), family.recurrent, _types(read)
    if data is None:
        return (False,) * count
    if types is not None:
        return tuple(name in data.types for name in _checked_types(read, types, count))
    if isinstance(attending := read.get("attn_layer_indices"), list):
        return tuple(index not in attending for index in range(count))
    return tuple(data.interval is None or (index + 1) % read.count(data.interval) != 0 for index in range(count))


def experts_by_layer(read: ConfigReader, family: Family) -> tuple[bool, ...]:
    """Return for each layer whether it has experts instead of an MLP."""
    count = count_layers(read)
    if family.experts is None or not read.optional_count("num_experts"):
        return (False,) * count
    if family.one_half:
        return tuple(name == "moe" for name in _checked_types(read, _types(read), count))
    return tuple(_is_sparse(read, index) for index in range(count))


def _is_sparse(read: ConfigReader, index: int) -> bool:
    dense = read.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ModelError(f"{read.where}: mlp_only_layers is {shorten(dense)}, not a list of layer numbers; correct it")
    if index in dense:
        return False
    types = read.get("mlp_layer_types")
    if isinstance(types, list) and index < len(types):
        return types[index] not in ("dense", "mlp")
    end = read.get("moe_layer_end_index")  # -1 = the last layer
    if type(end) is int and 0 <= end < index:
        return False
    if index < read.count("first_k_dense_replace", default=0, at_least=0):
        return False
    if type(read.get("moe_layer_freq")) is int:  # configs with a list here give their dense layers elsewhere
        return index % read.count("moe_layer_freq") == 0
    return (index + 1) % read.count("decoder_sparse_step", default=1) == 0


def positions_by_layer(read: ConfigReader, family: Family, windows: tuple[int | None, ...]) -> list[bool]:
    """Return for each layer whether it has rotary positions.

    Raises:
        ModelError: a list in config.json does not have one entry per layer.
    """
    has_windows = any(window is not None for window in windows)
    if family.rope.layers == "window" or (family.rope.layers == "local" and has_windows):
        return [window is not None for window in windows]
    if family.rope.layers == "named" and read.get("position_embedding_type") != "rope":
        return [False] * len(windows)
    if family.rope.layers != "listed":
        return [not recurrent for recurrent in recurrent_by_layer(read, family)]
    listed = read.get("no_rope_layers")
    if listed is None:
        interval = read.count("no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(len(windows))]
    if not isinstance(listed, list) or len(listed) != len(windows):
        raise ModelError(
            f"{read.where}: no_rope_layers must be a list with 0 or 1 for each of the {len(windows)} layers; correct it"
        )
    return [bool(item) for item in listed]
