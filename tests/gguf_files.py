"""GGUF files of tiny models as llama.cpp's converter writes them, by a table of our own beside quantkit's.

Source: llama.cpp `convert_hf_to_gguf.py`, `gguf-py/gguf/tensor_mapping.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Block

from quantkit.checkpoints.gguf_tokenizer import CONTROL, NORMAL
from tests.helpers import load_tensors

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in "qkv"},
    **{f"self_attn.{kind}_norm": f"attn_{kind}_norm" for kind in "qk"},
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    **{f"mlp.shared_expert{s}.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down") for s in ("", "s")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_b_proj": "attn_kv_b",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "granite": "granite",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
# The metadata of each entry of config.json, in the words of llama.cpp.
ENTRIES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "head_dim": "attention.key_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
FLOATS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "routed_scaling_factor": "expert_weights_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def write_as_llama_cpp_does(folder: Path, path: Path, block: Block = Block.F32, **changes: Any) -> Path:
    """Write a tiny Hugging Face model as a GGUF file.

    Args:
        folder: the model, with the tokenizer of `save_tokenizer`.
        path: the file.
        block: type of the matrices whose rows its blocks divide.
        changes: entries of the metadata; None removes one.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config, architecture), **_vocabulary(folder, config), **changes}.items():
        if value is not None:
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, tensor in _tensors(load_tensors(folder), config).items():
        tensor = tensor.float().contiguous()
        fits = (
            tensor.dim() > 1
            and "ffn_gate_inp" not in name
            and name.endswith("weight")
            and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[block][0] == 0
        )
        if fits and block != Block.F32:
            writer.add_tensor(name, gguf.quantize(tensor.numpy(), block), raw_dtype=block)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    entries = {theirs: config[ours] for ours, theirs in ENTRIES.items() if config.get(ours) is not None}
    entries |= {theirs: float(config[ours]) for ours, theirs in FLOATS.items() if config.get(ours) is not None}
    entries["rope.freq_base"] = float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    entries["rope.dimension_count"] = width
    if architecture == "gpt-oss":
        entries["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "deepseek2":
        rotated = config["qk_rope_head_dim"]
        entries["rope.dimension_count"] = rotated
        key, value, rank = config["qk_nope_head_dim"] + rotated, config["v_head_dim"], config["kv_lora_rank"]
        entries |= {
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.head_count_kv": 1,
        }
        entries |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
        is_v3 = config["model_type"] == "deepseek_v3"
        entries |= {"expert_gating_func": 2 if is_v3 else 1, "expert_weights_norm": bool(config["norm_topk_prob"])}
    return {f"{architecture}.{key}": value for key, value in entries.items()}


def _vocabulary(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [f"[PAD{number}]" for number in range(config["vocab_size"])]
    for token, number in vocab.items():
        tokens[number] = token
    types = [CONTROL] * 2 + [NORMAL] * 256 + [5] * (len(tokens) - 258)
    entries = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["Ġ Ġ"]}
    tokens[-1] = "ĠĠ"
    entries |= {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def _tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    written: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    interleaved = ARCHITECTURES[config["model_type"]] in ("llama", "granite")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        module, _, local = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            written[f"{OUTER[module]}.{local}"] = tensor
            continue
        prefix, relative = f"blk.{match[1]}.", match[2]
        inside, leaf = relative.rpartition(".")[0], relative.rpartition(".")[2]
        if expert := EXPERT.fullmatch(relative):
            stacks.setdefault(f"{prefix}ffn_{KINDS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
        elif relative == "self_attn.sinks":
            written[f"{prefix}attn_sinks.weight"] = tensor
        elif relative.endswith("e_score_correction_bias"):
            written[f"{prefix}exp_probs_b.bias"] = tensor
        elif relative.startswith("mlp.experts."):  # gpt-oss
            local = "bias" if relative.endswith("_bias") else "weight"
            value = tensor if local == "bias" else tensor.transpose(1, 2)
            if "down" in relative:
                written[f"{prefix}ffn_down_exps.{local}"] = value
            else:
                written[f"{prefix}ffn_gate_exps.{local}"], written[f"{prefix}ffn_up_exps.{local}"] = (
                    value[:, ::2],
                    value[:, 1::2],
                )
        elif relative == "self_attn.kv_b_proj.weight":
            rows = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
            key, value = rows.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            written[f"{prefix}attn_k_b.weight"], written[f"{prefix}attn_v_b.weight"] = key.transpose(1, 2), value
        else:
            kind = inside.rpartition(".")[2]
            if interleaved and kind in heads:
                halves = tensor.view(heads[kind], 2, -1, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            theirs = NAMES[inside]
            if theirs == "ffn_norm" and config["model_type"] == "gpt_oss":
                theirs = "post_attention_norm"
            written[f"{prefix}{theirs}.{leaf}"] = tensor.flatten() if theirs == "ffn_gate_inp_shexp" else tensor
    return written | {name: torch.stack([parts[number] for number in sorted(parts)]) for name, parts in stacks.items()}
