"""Find which layers of a model have windows, states, experts and rotary positions.

Lists in config.json determine this; without a list, the family's rule applies.
"""

from typing import Any

from quantkit.errors import ModelError
from quantkit.models.config import ConfigReader
from quantkit.models.family import Family
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.safety.untrusted import shorten

_FULL = ("full_attention", "attention", "global_attention", "indexed_attention")
_WINDOWED = {
    "sliding_attention": "sliding_window",
    "local_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_STATE_SPACE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2")


def count_layers(read: ConfigReader) -> int:
    """Return the number of decoder layers: the count in config.json, or else the length of the list of layer types."""
    types = _types(read)
    return read.count("num_hidden_layers", default=len(types) if isinstance(types, list) else None)


def _types(read: ConfigReader) -> Any:
    """Return the entry of config.json that lists a type per layer; None if there is no such entry."""
    pattern = read.get("hybrid_override_pattern")
    if read.get("layer_types") is None and isinstance(pattern, str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    return read.get("layer_types")


def halves_by_layer(read: ConfigReader, family: Family) -> tuple[bool, ...]:
    """Return for each layer whether it is only an MLP or experts, without attention; see `Family.one_half`."""
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
            f"{read.where}: {model_type} keeps a state instead of keys and values, but plan supports only attention "
            "layers; give --params to plan the weights alone"
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
            f"for each of the {count} layers"
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
        raise ModelError(f"{read.where}: no_rope_layers must be a list of 0 or 1 for each of the {len(windows)} layers")
    return [bool(item) for item in listed]
