"""Small seeded models with real architecture code and a byte tokenizer; nothing is downloaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Trained models beside the repository, where they are; they are no part of it.
SHARED = Path(__file__).parents[2] / "shared" / "models"
# Of every tiny model, unless its family needs others.
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# What a tiny model of a family needs beside the sizes that all share.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MIXTURE = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_GROUPS = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
_LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "num_key_value_heads": 4,
}
_DELTA = {
    **dict.fromkeys(("linear_key_head_dim", "head_dim"), 16),
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
_SHARED = {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 32, "num_hidden_layers": 4, "logit_scale": 0.5},
    "cwm": {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 4},
    "deepseek_v2": {**_MIXTURE, **_GROUPS, **_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_MIXTURE, **_GROUPS, **_LATENT},
    "deepseek_v4": {
        **_MIXTURE,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        **dict.fromkeys(("index_n_heads", "index_head_dim"), 16),
        "index_topk": 4,
        "partial_rotary_factor": 0.25,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "hc_mult": 2,
    },
    "glm4_moe_lite": {**_MIXTURE, **_LATENT, "q_lora_rank": None},
    "youtu": {**_LATENT, "rope_interleave": False, "initializer_range": 0.02},
    "dots1": {**_MIXTURE, **_GROUPS, "head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone4": {"sliding_window": 32, "num_hidden_layers": 4},
    "exaone_moe": {
        **_EXPERTS,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "sliding_window": 32,
        "num_hidden_layers": 4,
    },
    "flex_olmo": {**_EXPERTS},
    "gemma": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 32,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {"head_dim": 32, "sliding_window": 32, "num_hidden_layers": 6, "query_pre_attn_scalar": 24},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**_MIXTURE, **_GROUPS, "head_dim": 16},
    "gptj": {"rotary_dim": 8},
    "gpt_neox": {"num_key_value_heads": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.25},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.25,
        "shared_intermediate_size": 64,
    },
    "ministral3": {
        "head_dim": 16,
        "sliding_window": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granite": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE,
        **_MAMBA,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "hy_v3": {**_EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 1, "head_dim": 16},
    "hyperclovax": {"logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.4},
    "jais2": {},
    "mellum": {
        **_EXPERTS,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "ministral": {"head_dim": 16, "sliding_window": 32},
    "mistral": {"sliding_window": 32},
    "mixtral": {"num_local_experts": 4, "sliding_window": 32},
    "nemotron": {},
    "olmo": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        **dict.fromkeys(("ssm_state_size", "mamba_head_dim", "head_dim"), 16),
        "mamba_num_heads": 8,
        "n_groups": 2,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 32, "num_hidden_layers": 4},
    "olmoe": {**_EXPERTS},
    "phi": {},
    "phi3": {"sliding_window": 32},
    "qwen2_moe": _SHARED,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    "seed_oss": {"head_dim": 16},
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_SHARED},
    "smollm3": {"num_hidden_layers": 4},
    "solar_open": {**_MIXTURE, "head_dim": 16, "n_group": 2, "topk_group": 1},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 32},
    "vaultgemma": {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 24},
}
# The same of models of these families that have experts.
GRANITE_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
EXPERT_FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "glm4_moe_lite",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
    "glm4_moe",
    "gpt_oss",
    "hunyuan_v1_moe",
    "hy_v3",
    "mellum",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
)
# Families without experts that the runtime computes, beside those above.
MORE_FAMILIES = tuple(name for name in SETTINGS if name not in (*FAMILIES, *EXPERT_FAMILIES))

# Families that are compressed here and run by transformers.
COMPRESSED_ONLY: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {"multi_query": True, "alibi": False},
    "gpt2": {},
    "gpt_bigcode": {},
    "mpt": {"expansion_ratio": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


def known_to_transformers(family: str) -> bool:
    """Whether the installed version has this family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return family in CONFIG_MAPPING_NAMES


EVERY_FAMILY = [
    name for name in (*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES, *COMPRESSED_ONLY) if known_to_transformers(name)
]
"""Of which there are tiny models, and transformers has them."""


def one_of_each(names: Iterable[str], choices: Collection[Any]) -> list[Any]:
    """A choice for each name, for `parametrize`: the next name's is the next one. All pairs would find little more."""
    return list(zip(names, itertools.cycle(choices), strict=False))


TEXT = "\n\n".join(
    f"The {animal} of {town} counted {number} apples and gave {number - 3} of them to a friend called {name}."
    for number, (animal, town, name) in enumerate(
        [
            (a, t, n)
            for a in ("fox", "owl", "cat", "bear")
            for t in ("Rome", "Oslo", "Lima")
            for n in ("Ann", "Bo", "Cy")
        ],
        start=11,
    )
)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with <s>, </s> and 256 byte pieces: 258 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{piece: number + 2 for number, piece in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers config of a family: two layers, width 64, four query heads on two key/value heads."""
    from transformers import AutoConfig

    own = SETTINGS.get(family, COMPRESSED_ONLY.get(family, {}))
    return AutoConfig.for_model(family, **{**SIZES, "tie_word_embeddings": False, **own, **changes})


def make_model(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, shards: int = 1, **changes: Any
) -> Path:
    """Write a random model with a tokenizer; weights have outlier channels so that calibration has something to do."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name and "_norm" not in name.rsplit(".", 2)[1]:
                parameter.mul_(torch.exp(0.8 * torch.randn_like(parameter)))
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "proj" in name:
                parameter.mul_(4)
    shard_size = (
        "100GB" if shards == 1 else f"{max(1, sum(p.numel() for p in model.parameters()) * 4 // shards // 1000)}KB"
    )
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    save_tokenizer(folder)
    return folder


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a one-file checkpoint; dots in names are written as double underscores; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})


def transformers_logits(folder: Path, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits (B, T, V) of a checkpoint as plain transformers loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(input_ids=token_ids).logits


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything under a folder: bytes of files, targets of links, None for the rest."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }
