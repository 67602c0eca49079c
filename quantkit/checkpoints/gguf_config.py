"""Build the config.json of the model in a GGUF file from the file's metadata and tensors.

A family's `GGUFNames` maps metadata keys to keys of config.json; the GGUF writer uses the same table.
Source: llama.cpp `src/models/*.cpp`, `convert_hf_to_gguf.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoints.gguf_tokenizer import token_id
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.config import ConfigReader
from quantkit.models.families import known
from quantkit.models.family import Family
from quantkit.models.gguf_names import llama3_divisors
from quantkit.models.rope import read_rope
from quantkit.safety.untrusted import shorten

# Tokens that end a turn; llama.cpp recognises them by their texts.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
    "<|eom_id|>",
)
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# As in llama.cpp: in one model of each of these architectures, the attention scale depends on hidden width / heads, not
# on the head width. The number of layers identifies that model.
_WIDE = {"gemma2": 46, "gemma3": 62}
_SIGMOID = 2


@dataclass(frozen=True, slots=True)
class Lookup:
    """Access to a GGUF file's tensors: all shapes, and the values of short tensors.

    Args:
        where: path of the file, for messages.
        shapes: shape of each tensor, keyed by name.
        vector: function that reads the short tensor with a given name; returns None if the file has no such tensor.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    vector: Callable[[str], list[float] | None]


class _Metadata:
    """Entries of a GGUF file's metadata whose keys begin with the name of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], name: str, where: str) -> None:
        self._entries, self._name, self._where = metadata, name, where

    def get(self, key: str) -> Any:
        value = self._entries.get(f"{self._name}.{key}")
        if isinstance(value, list) and value:  # one value per layer
            if any(item != value[0] for item in value):
                raise ModelError(f"{self._where}: {self._name}.{key} differs between layers, which is not supported")
            value = value[0]
        return value

    def count(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or not 0 < value < 1 << 32:
            raise CheckpointError(
                f"{self._where}: {self._name}.{key} is {shorten(value)}, not a whole number above zero; "
                "download the file again"
            )
        return value


def build_config(metadata: Mapping[str, Any], lookup: Lookup) -> tuple[Family, dict[str, Any]]:
    """Return the family of the model, and the contents of its config.json without the dtype.

    Raises:
        ModelError: the architecture, or one of its settings, is not supported.
        CheckpointError: an entry of the metadata is missing or wrong.
    """
    name = metadata.get("general.architecture")
    entries = _Metadata(metadata, str(name), lookup.where)
    family, family_name = _find_family(name, entries, lookup.where)
    names = family.gguf
    assert names is not None
    if "token_embd.weight" not in lookup.shapes or len(lookup.shapes["token_embd.weight"]) != 2:
        raise CheckpointError(f"{lookup.where} has no matrix token_embd.weight; download the file again")
    heads, hidden = entries.count("attention.head_count"), entries.count("embedding_length")
    config: dict[str, Any] = {
        "architectures": [family.hf_names[0]],
        "model_type": family_name.replace("-", "_"),
        **{ours: value for key, ours in names.numbers.items() if (value := entries.get(key)) is not None},
        "num_hidden_layers": entries.count("block_count"),
        "vocab_size": lookup.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in lookup.shapes,
        **names.fixed,
    }
    width = entries.get("attention.key_length") or hidden // heads
    if family.latent:
        config |= _latent(entries, config)
    elif names.rotary:
        config["head_dim"] = width
        root = family.multipliers.attention_root
        if root is not None:
            config[root] = hidden // heads if _WIDE.get(names.name) == config["num_hidden_layers"] else width
    for part, key in (("attn_q", "attention_bias"), ("ffn_gate", "mlp_bias")):
        if f"blk.0.{part}.bias" in lookup.shapes:
            config[key] = True
    if names.rotary:
        config |= _rotary(entries, config, family, lookup)
    return family, config | _special(metadata, lookup.where)


def _find_family(name: Any, entries: _Metadata, where: str) -> tuple[Family, str]:
    read = [(family, key) for key, family in known().items() if family.gguf is not None]
    has_experts = bool(entries.get("expert_count"))
    scoring = "sigmoid" if entries.get("expert_gating_func") == _SIGMOID else "softmax"
    for family, key in read:
        assert family.gguf is not None
        own = family.experts
        fits = not has_experts if own is None else has_experts and own.scoring == scoring
        if family.gguf.name == name and fits:
            return family, next(iter(family.model_types), key) if key.startswith("gemma3") else key
    listed = ", ".join(dict.fromkeys(family.gguf.name for family, _ in read if family.gguf is not None))
    kind = f" with {entries.get('expert_count')} experts and {scoring} routing" if has_experts else ""
    raise ModelError(f"{where}: architecture {shorten(name)}{kind} is not supported; supported: {listed}")


def _latent(entries: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the entries of latent attention added.

    Newer GGUF files store the sizes of a head under keys that end in `_mla`.
    """
    key = entries.get("attention.key_length_mla") or entries.count("attention.key_length")
    value = entries.get("attention.value_length_mla") or entries.count("attention.value_length")
    rotated = entries.count("rope.dimension_count")
    norm = entries.get("expert_weights_norm")
    sizes = {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "norm_topk_prob": bool(norm),
    }
    groups: dict[str, Any] = {"topk_method": "group_limited_greedy"}
    if (config.get("n_group") or 1) == 1:
        groups = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return {"q_lora_rank": None, "first_k_dense_replace": 0, **config, **sizes, **groups}


def _rotary(entries: _Metadata, config: Mapping[str, Any], family: Family, lookup: Lookup) -> dict[str, Any]:
    """Return config.json's entries of the rotary embedding: rope_theta, rope_scaling and, for some models, others."""
    theta, length = entries.get("rope.freq_base") or 10000.0, entries.get("context_length")
    rotated, width = entries.get("rope.dimension_count"), config.get("head_dim")
    rope: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if not family.latent and rotated is not None and rotated != width:
        rope["partial_rotary_factor"] = rotated / width  # type: ignore[operator]
    kind, factor = entries.get("rope.scaling.type"), entries.get("rope.scaling.factor")
    original = entries.get("rope.scaling.original_context_length") or length
    divisors = lookup.vector("rope_freqs.weight")
    # Files of Phi-3 have a tensor for long contexts and one for short contexts; older files repeat them in each layer.
    long, short = (lookup.vector(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if long is not None and short is not None:
        scale = entries.get("rope.scaling.attn_factor")
        attention = {} if scale is None else {"attention_factor": scale}
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short, **attention}
        rope |= {"rope_scaling": scaling, "original_max_position_embeddings": original}
    elif divisors is not None:
        rope["rope_scaling"] = _divided(divisors, theta, lookup.where)
    elif kind == "yarn":
        rope["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if family.latent and (log := entries.get("rope.scaling.yarn_log_multiplier")):
            rope["rope_scaling"] |= {"mscale": 10 * log, "mscale_all_dim": 10 * log}
        if config["model_type"] == "gpt_oss":
            rope["rope_scaling"]["truncate"] = False
    elif kind == "linear" and factor != 1:
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind not in (None, "none", "linear"):
        raise ModelError(f"{lookup.where}: RoPE scaling {shorten(kind)} is not supported; supported: yarn, linear")
    return rope


def _divided(divisors: list[float], theta: float, where: str) -> dict[str, Any]:
    """Return config.json's entries of the llama3 RoPE scaling (Llama 3.1 and later) that has these divisors."""
    for original in (8192, 4096, 16384):
        factor = max(divisors, default=0.0)
        scaling = {**_LLAMA3, "factor": factor, "original_max_position_embeddings": original}
        if factor < 1:
            break
        entries = ConfigReader({"rope_theta": theta, "rope_scaling": scaling}, where=where)
        rope = read_rope(entries, Family().rope, 2 * len(divisors), original, local=False)
        if all(abs(one - two) <= 1e-4 * two for one, two in zip(divisors, llama3_divisors(rope), strict=True)):
            return scaling
    raise ModelError(f"{where}: the divisors in rope_freqs.weight match no supported RoPE scaling (supported: llama3)")


def _special(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return config.json's token ids: of BOS, of padding, and of all tokens that end a text or a turn."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    known_ends = (
        {text: number for number, text in enumerate(tokens) if text in _ENDS} if isinstance(tokens, list) else {}
    )
    stated = (token_id(metadata, key, where) for key in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys([*(number for number in stated if number is not None), *known_ends.values()]))
    ids = {f"{ours}_token_id": token_id(metadata, key, where) for ours, key in (("bos", "bos"), ("pad", "padding"))}
    return {**ids, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
