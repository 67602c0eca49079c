"""A tiny random model of every class of transformers: its default configuration, shrunk by what its entries are called.

Nothing here knows a family: `SMALL` says how small an entry of that name becomes, wherever it stands, and `DIFFERENT`
what the rules get wrong for one model type. `VARIANTS` are further settings of a class that change its tensors.
Widths are 128 or 256, so that groups of 128 weights fit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch

VOCABULARY, WIDTH, HEAD, HEADS, EXPERTS, LENGTH, WINDOW = 384, 128, 32, 4, 4, 512, 16
LARGEST = 30_000_000  # parameters of a model that is still called tiny
# Name of an entry, matched whole; what it becomes if it is larger. The first that matches counts.
SMALL: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|n_vocab|num_embeddings|.*_vocab", VOCABULARY),
    (
        r"(n_positions|n_ctx|max_seq_len|seq_length|max_position_embeddings|max_.*position.*|max_sequence_length)",
        LENGTH,
    ),
    (r".*sliding_window.*|index_topk|window_size|attention_window_size|attention_chunk_size|window", WINDOW),
    (r"linear_num_value_heads|mamba_(num|n)_heads|mamba_num_heads|n_mamba_heads", 8),
    (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|num_key_heads|kv_heads|kv_n_heads).*|num_query_groups", 2),
    (r".*(_heads|n_head|num_heads|nhead).*", HEADS),
    (r"qk_head_dim", 2 * HEAD),
    (r".*rotary_dim", HEAD // 2),
    (r".*(head_dim|d_head|head_size|d_kv|rope_dim)", HEAD),
    (r"topk_group", 1),
    (r"n_group|num_expert_groups?", 2),
    (r".*(experts_per_tok|top_?k|moe_k|experts_per_token|top_k_experts|num_selected_experts|moe_topk).*", 2),
    (r".*(num_.*experts|n_.*experts|num_experts|moe_num_experts|ffn_num_experts)", EXPERTS),
    (r".*(n_groups|ngroups|num_groups)", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|first_k_dense.*", 1),
    (r".*(moe|expert).*(intermediate|ffn|hidden|dim|size).*", WIDTH),
    (r".*(intermediate|ffn|inner|mlp_dim|d_ff|feed_?forward|mlp_hidden|dim_ff).*", 2 * WIDTH),
    (r".*(d_ssm|lru_width|d_inner)", 2 * WIDTH),
    (r".*(state_size|d_state|ssm_state.*|state_dim)", 16),
    (r".*(image_size)", 56),
    (r"(mamba_)?chunk_size", WINDOW),  # what is shorter is computed as long as that
    (r".*(num_mel_bins|chunk.*size|patch_size|.*_stride|kernel.*|.*conv_size)", 1 << 30),
    (r".*(num_image_tokens|image_seq_len.*|num_queries|query_length|num_query.*)", 4),
    (r"base_channels|latent_channels", 32),
    (r".*(size|dim|dims|width|rank|n_embd|d_model|channels|hidden|features)s?(_global)?(_per_layer_input)?", WIDTH),
)
LAYERS = r"num_hidden_layers|n_layers?|num_layers|depth|num_.*layers|.*(encoder|decoder)_layers|n_.*_layers?|layers"
NO_LAYERS = r".*(shared|dense|skip|nextn|predict|deepstack|mtp|first|last).*"  # counts of some layers among all
TOKENS = r".*token_(id|index|ids)|.*_(id|idx)|.*token.*"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_HALF = {**_ROPE, "partial_rotary_factor": 0.5}
_ROPE_BY_KIND = {"full_attention": _ROPE, "sliding_attention": _ROPE}
# Entries of one model type, by dotted path; `text_config` and the like are walked by the rules too.
DIFFERENT: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 200, "vision_config.codebook_size": 40, "audio_token_offset": 240},
    "aria": {"projector_patch_to_query_dict": {"4": 4, "16": 4}},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND},
    "bloom": {"hidden_size": WIDTH, "n_head": HEADS},
    "chameleon": {"vocabulary_map": {"<image>": 300}, "image_token_id": 300},
    "dbrx": {
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
        "attn_config.kv_n_heads": 2,
        "num_key_value_heads": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
    },
    "deepseek_v4": {"o_groups": 1},
    "diffusion_gemma_text": {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": WIDTH},
    "dory": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 2 * HEAD},
    "emu3": {"vocabulary_map": {"<image>": 300}, "image_token_id": 300},
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH, "mamba_n_heads": 8, "mamba_d_head": HEAD},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [2 * WIDTH] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 2 * HEAD}}},
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 2 * HEAD}}},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0, "text_config.num_kv_shared_layers": 2},
    "gemma4_unified_assistant": {"text_config.num_kv_shared_layers": 2},
    "glm5_next_text": {"index_kpool": 2, "linear_num_heads": 2, "linear_head_dim": WIDTH},
    "granite4_vision": {"spatial_target_layers": [0], "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [4, 4, 4, 4]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [6, 6, 4]}},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 4},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
    },
    "janus_vision_model": {"num_image_tokens": 12},
    "kimi_linear": {"linear_head_dim": WIDTH, "linear_num_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4_text": {"moe_layers": [0, 1]},
    "mamba2": {"num_heads": 8, "head_dim": HEAD},
    "mistral4": {"head_dim": 2 * HEAD},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal_audio": {"num_blocks": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "attention_head_size": HEAD, "axial_pos_embds_dim": [64, 64]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "step3p5": {"sliding_window": WINDOW},
    "xlstm": {"num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD,
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD,
        "mamba_headdim": HEAD,
        "hybrid_layer_ids": [1, 3],
    },
    **{
        name: {"rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]}}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text")
    },
    **{
        name: {"rope_parameters": {**_ROPE_HALF, "mrope_section": [2, 3, 3]}}
        for name in ("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm46v_text")
    },
}
# Further rows: `<name of a row>:<what differs>` to the entries that do.
VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v3:one query projection": {"q_lora_rank": None},
    "falcon:many key heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma4_text:experts": {
        "enable_moe_block": True,
        "num_experts": EXPERTS,
        "top_k_experts": 2,
        "moe_intermediate_size": WIDTH,
    },
    "gemma4_text:keys are values": {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    "gemma4_text:shared caches": {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"1": {"head_dim": 2 * HEAD}, "3": {"head_dim": 2 * HEAD}},
    },
    "granitemoehybrid:dense": {"num_local_experts": 0},
    "llama:tied": {"tie_word_embeddings": True},
    "nemotron_h:latent experts": {"moe_latent_size": WIDTH},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One row of the table.

    Args:
        kind: class of the model.
        task: "causal" or "image-text": which of transformers' lists it is in.
        model_type: of its configuration.
        changes: entries of it by dotted path, beside those of the type.
    """

    kind: str
    task: str
    model_type: str
    changes: Mapping[str, Any]

    @property
    def auto(self) -> Any:
        """The class that a user loads it with."""
        import transformers

        return transformers.AutoModelForCausalLM if self.task == "causal" else transformers.AutoModelForImageTextToText

    @property
    def has_encoder(self) -> bool:
        """Whether models of this type are an encoder and a decoder; a class for the decoder alone forgets that."""
        from transformers import CONFIG_MAPPING

        return bool(CONFIG_MAPPING[self.model_type]().is_encoder_decoder)


@cache
def rows() -> dict[str, Spec]:
    """Every row by name: the model type; a variant has its setting behind a colon, an image model its task."""
    from transformers.models.auto import modeling_auto as auto

    known = {}
    for model_type, kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        # As a causal language model a wrapper is its text model, which has a row of its own.
        if model_type not in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            known[model_type] = Spec(kind=kind, task="causal", model_type=model_type, changes={})
    for model_type, kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        spec = Spec(kind=kind, task="image-text", model_type=model_type, changes={})
        known[f"{model_type}+image"] = spec
    for name, changes in VARIANTS.items():
        known[name] = replace(known[name.partition(":")[0]], changes=changes)
    return known


def tiny_config(model_type: str, changes: Mapping[str, Any]) -> Any:
    """The default configuration of a model type, made small.

    Args:
        model_type: as in config.json.
        changes: entries by dotted path, put in after the rules.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    _fill(default)
    small = shrink(default.to_dict())
    _change(small, changes)
    return kind.from_dict(small)


def _change(entries: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        inner = reduce(lambda entries, name: entries.setdefault(name, {}), parents, entries)
        inner[leaf] = copy.deepcopy(value)


def _fill(config: Any) -> None:
    """Give a wrapper the vision model that its default leaves out."""
    for name, kind in getattr(config, "sub_configs", {}).items():
        if name == "vision_config" and getattr(config, name, None) is None and hasattr(kind, "sub_configs"):
            setattr(config, name, kind())


def shrink(entries: dict[str, Any]) -> dict[str, Any]:
    """`config.to_dict()` with every entry as small as the rules say, sub-configurations included."""
    entries = copy.deepcopy(entries)
    for name in ("transformers_version", "_name_or_path", "id2label", "label2id"):
        entries.pop(name, None)
    total = _number_of_layers(entries)
    kept = _kept_layers(entries, total)
    small = _small_entries(entries, total, kept)
    if "head_dim" in entries and entries["head_dim"] is None:
        small["head_dim"] = HEAD  # some classes forget to compute it
    _change(small, DIFFERENT.get(entries.get("model_type", ""), {}))
    return small


def _small_entries(entries: Mapping[str, Any], total: int, kept: list[int]) -> dict[str, Any]:
    small = {name: _small(name, value, total, kept) for name, value in entries.items()}
    if "num_key_value_heads" in entries and entries["num_key_value_heads"] == entries.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]  # some classes know no other case
    return small


def _number_of_layers(entries: Mapping[str, Any]) -> int:
    counts = [value for name, value in entries.items() if _is_count(name, value)]
    lists = [len(value) for name, value in entries.items() if "layer" in name and isinstance(value, list)]
    return max([count for count in counts if count in lists] or counts or lists or [0])


def _is_count(name: str, value: Any) -> bool:
    return type(value) is int and bool(re.fullmatch(LAYERS, name)) and not re.fullmatch(NO_LAYERS, name)


def _kept_layers(entries: Mapping[str, Any], total: int) -> list[int]:
    """One layer of each kind that lists with an entry per layer tell apart; two at least."""
    lists = [value for value in entries.values() if isinstance(value, list) and len(value) == total]
    kinds: dict[str, int] = {}
    for index, row in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(str(row), index)
    kept = sorted(kinds.values())[:6]
    for index in range(total):
        if len(kept) >= 2:
            break
        kept = sorted({*kept, index})
    return kept


def _small(name: str, value: Any, total: int, kept: list[int]) -> Any:
    if isinstance(value, dict):
        if value and all(str(key).isdigit() for key in value):  # by layer
            items = {kept.index(int(key)): item for key, item in value.items() if int(key) in kept}
            return {str(index): _small(name, item, 0, []) for index, item in items.items()}
        if "model_type" in value or name.endswith("_config"):
            return shrink(value)
        return _small_entries(value, 0, [])
    if isinstance(value, list):
        return _small_list(name, value, total, kept)
    if type(value) is not int:
        return value
    if _is_count(name, value):
        return min(value, len(kept) if value == total else 2)
    if re.fullmatch(TOKENS, name) and value >= VOCABULARY:
        return VOCABULARY - 1 - sum(name.encode()) % 100  # apart from each other, mostly
    limit = next((limit for pattern, limit in SMALL if re.fullmatch(pattern, name)), 1 << 30)
    return min(value, limit)


def _small_list(name: str, value: list[Any], total: int, kept: list[int]) -> list[Any]:
    if total and len(value) == total:
        return [_small(name, value[index], 0, []) for index in kept]
    if name.endswith("section") and all(type(item) is int for item in value):  # of half a head's rotations
        return _sections(value)
    return [_small(name, item, 0, []) if type(item) is int else item for item in value]


def _sections(value: list[int]) -> list[int]:
    parts = [item * (HEAD // 2) // sum(value) for item in value]
    parts[-1] += HEAD // 2 - sum(parts)
    return parts


def build(spec: Spec, seed: int = 0) -> Any:
    """A random model in float32 in which every weight matters: matrices that keep sizes, norms that are not 1.

    Raises:
        ValueError: it is not tiny.
    """
    config = tiny_config(spec.model_type, spec.changes)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in spec.auto.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters: the rules have missed a size")
    torch.manual_seed(seed)
    model = spec.auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _liven(name, parameter)
    return model


def _liven(name: str, parameter: torch.Tensor) -> None:
    if not parameter.is_floating_point():
        return
    broken = not bool(torch.isfinite(parameter).all())
    spread = 0.0 if broken or parameter.numel() < 2 else float(parameter.std())
    if parameter.dim() < 2:
        parameter.copy_(torch.randn_like(parameter) * 0.1 + (0 if broken else parameter))
    elif spread == 0:
        parameter.normal_(std=WIDTH**-0.5) if broken or not parameter.any() else None
    elif spread < WIDTH**-0.5 and "embed" not in name:
        parameter.mul_(WIDTH**-0.5 / spread)
