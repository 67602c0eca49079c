"""Find the shape of the model that a user names by a directory, config file, hub id, shape file or parameter count.

No weights are read, and only config.json is fetched from the hub.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.checkpoints.folder import (
    checked_names,
    download,
    find_tensors,
    is_hub_id,
    read_config_file,
    resolve,
    weight_files,
)
from quantkit.checkpoints.header import TensorInfo
from quantkit.checkpoints.symlinks import check_links
from quantkit.errors import ModelError, SchemeError, suggestion
from quantkit.formats import is_gguf
from quantkit.models.description import ModelDescription, describe
from quantkit.models.families import family_for_counting
from quantkit.models.kv_sizes import KVForm, form_of_schemes
from quantkit.models.mtp import mtp_prefixes
from quantkit.planning.counting import from_config, from_headers, head_shapes
from quantkit.planning.shape import ModelShape
from quantkit.quantities import parse_parameters, scaled_count
from quantkit.safety.untrusted import parse_yaml, read_object, read_text

# Entries that a shape file may have: all that the count reads from a config.json.
KEYS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("attention_bias", "mlp_bias", "use_qk_norm", "layer_types", "sliding_window", "sliding_window_pattern"),
    *("use_sliding_window", "max_window_layers", "attention_chunk_size", "num_local_experts", "num_experts"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq"),
    *("mlp_layer_types", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("index_head_dim", "index_n_heads", "index_topk", "compress_ratios", "compress_rates", "o_groups", "o_lora_rank"),
    *("hc_mult", "num_hash_layers", "name"),
)


def from_model(model: str | Path | None) -> ModelShape:
    """Return the shape of a model directory, a GGUF file, a config.json, or a hub id; None = the bundled demo model.

    The shape is counted from shard headers if all shards exist, otherwise from the config.

    Raises:
        ModelError: there is no such model, or its config lacks a required entry.
        CheckpointError: a shard is damaged.
    """
    if model is None:
        return _from_folder(resolve(None), "demo")
    path = Path(model).expanduser()
    if path.is_dir() or is_gguf(path):
        return _from_folder(path, path.resolve().name)
    if path.is_file():
        return from_config(description_of(_read(path), str(path)), path.stem, "config.json")
    if not is_hub_id(str(model)):
        raise ModelError(
            f"no such model directory or config file: {model}; check the path, or give --shape or --params"
        )
    data = _read(download(str(model), "config.json"))
    return from_config(description_of(data, f"{model}/config.json"), str(model), "config.json")


def from_shape_file(path: str | Path) -> ModelShape:
    """Return the shape that a YAML or JSON file describes with the entries of a config.json.

    Raises:
        ModelError: the file cannot be read, has an unknown entry, or lacks a size.
    """
    file = Path(path)
    data = _read(file)
    if "architectures" not in data:  # a config.json has more entries than the count needs; a shape file must not
        for key in data:
            if key not in KEYS:
                raise ModelError(
                    f"{file}: unknown entry {key!r}{suggestion(str(key), KEYS)}; use the names of config.json"
                )
    return from_config(description_of(data, str(file)), str(data.get("name") or file.stem), "shape file")


def from_parameters(text: str) -> ModelShape:
    """Return the shape of a model known only by its number of parameters, `7B` or `30B-A3B`.

    Raises:
        InputError: the text is not a number of parameters.
    """
    total, active = parse_parameters(text)
    return ModelShape(
        name=f"{scaled_count(total)} parameters",
        counted_from="parameter count",
        other=round(total),
        active_total=round(active),
        remarks=("only the weights are known; to see the cache and what fits, give a config.json or --shape",),
    )


def _from_folder(folder: Path, name: str) -> ModelShape:
    path = folder / "config.json"
    if is_gguf(folder):
        data = read_config_file(folder)
    else:
        check_links(folder)
        if not path.is_file():
            raise ModelError(f"{path} is missing; give a directory with a config.json, or --shape or --params")
        data = _read(path)
    model = description_of(data, str(path))
    files = weight_files(folder)
    if not files or not all(file.is_file() for file in files):
        shape = from_config(model, name, "config.json")
    elif _has_codes(data):
        shape = _quantized(model, name, folder)
    else:
        shape = from_headers(model, name, _own_names(model, find_tensors(folder)[0]))
    return replace(shape, cache=_cache(data, shape))


def _own_names(model: ModelDescription, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return headers keyed by names in the model, even if files use the names of the original release."""
    names = None if model.family.published is None else model.family.published(tuple(tensors))
    return tensors if names is None else {own: tensors[name] for name, own in names.own(tuple(tensors)).items()}


def _has_codes(data: dict[str, Any]) -> bool:
    """Whether weights are quantized, and not only the KV cache."""
    section = data.get("quantization_config")
    # Empty `config_groups` are how compressed-tensors says that only the cache is quantized.
    return section is not None and not (isinstance(section, dict) and section.get("config_groups") == {})


def _cache(data: dict[str, Any], shape: ModelShape) -> KVForm | None:
    """Return the KV cache settings in config.json; imports torch only if there are any."""
    section = data.get("quantization_config")
    said = isinstance(section, dict) and (section.get("kv_cache_scheme") or "kv_cache_quant_algo" in str(section))
    if not shape.layers or not (said or "quantkit_kv_cache" in data):
        return None
    from quantkit.checkpoints.kv_cache_entries import read_cache_schemes

    try:
        schemes = read_cache_schemes(data, len(shape.layers))
    except SchemeError:  # the runtime reports it and ignores the settings
        return None
    return None if schemes is None else form_of_schemes("checkpoint", schemes, shape.dtype_bytes)


def _quantized(model: ModelDescription, name: str, folder: Path) -> ModelShape:
    """Return the shape of a quantized checkpoint: parameters from the config, bytes from the headers."""
    tensors = find_tensors(folder)[0]
    stored = sum(tensor.num_bytes for tensor in tensors.values())
    remarks = ("the weights are already quantized: their bytes are those of the shards",)
    shape = from_config(model, name, "config.json and shard headers")

    @functools.cache
    def reader() -> Any:
        # Imported only when a recipe keeps codes, because these modules import torch and transformers' libraries.
        from quantkit.checkpoints.dense_source import open_dense
        from quantkit.checkpoints.model_reader import ModelReader

        return ModelReader.of(open_dense(folder), model.family)

    return replace(
        shape,
        stored_bytes=stored,
        quantized=True,
        mtp=(heads := head_shapes(model, tensors)),
        mtp_parameters=shape.mtp_parameters if heads else 0,
        mtp_stored_bytes=sum(one.num_bytes for name, one in tensors.items() if name.startswith(mtp_prefixes(model))),
        remarks=remarks,
        stored=lambda linear: reader().stored_scheme(f"{linear}.weight"),
    )


def description_of(data: dict[str, Any], where: str) -> ModelDescription:
    """Return the description of a model from its config.json; an unknown family is treated like Llama if possible.

    Raises:
        ModelError: a size is missing or invalid, or the model caches something other than keys and values.
    """
    return describe(data, family_for_counting(data), where)


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        return checked_names(read_object(path, ModelError, "correct it or download it again"), str(path))
    data = parse_yaml(read_text(path, ModelError), str(path), ModelError)  # JSON is YAML, too
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a mapping of names to sizes; use the entries of a config.json")
    return checked_names(data, str(path))
