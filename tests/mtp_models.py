"""Tiny models with random MTP heads in their files; transformers does not build these heads itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.models.description import describe
from quantkit.models.families import find_language_model
from quantkit.models.mtp import head_tensors, mtp_heads
from tests.helpers import edit_config, load_tensors, make_model

# Model types, and whether their heads' experts are stored as one tensor.
HEADS = {
    "qwen3_5_text": False,
    "qwen3_5_moe_text": True,
    "qwen3_next": False,
    "deepseek_v3": False,
    "glm4_moe": False,
}


def make_mtp_model(
    folder: Path, kind: str, *, stacked: bool | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """Write a random model with one MTP head.

    Args:
        folder: folder to create.
        kind: model type of transformers.
        stacked: whether the head's experts are stored in one tensor of three dimensions; None = as published.
        dtype: dtype of all weights.
        changes: changes of the configuration.
    """
    # GPTQ stores only linears with a multiple of 32 outputs.
    sizes = {"qk_rope_head_dim": 32} if kind == "deepseek_v3" else {}
    make_model(folder, kind, dtype=dtype, **{**sizes, **changes})
    edit_config(folder, **{_key(kind): 1})
    tensors = head_weights(folder, HEADS[kind] if stacked is None else stacked)
    tensors = load_tensors(folder) | {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def head_weights(folder: Path, stacked: bool) -> dict[str, Tensor]:
    """Random tensors of all MTP heads that config.json names, from the family's description."""
    family, inner = find_language_model(json.loads((folder / "config.json").read_text()))
    model = describe(inner, family)
    tensors: dict[str, Tensor] = {}
    for head in mtp_heads(model):
        parts = head_tensors(model, head)
        tensors |= {name: 1 + 0.1 * torch.randn(shape) for name, shape in parts.vectors.items()}
        for matrix in parts.matrices:
            for name in matrix.names:
                tensors[f"{name}.weight"] = 0.1 * torch.randn(matrix.out_features, matrix.in_features)
        if stacked and model.experts is not None:
            experts = f"{head.block}mlp.experts"
            own = [
                {part: tensors.pop(f"{experts}.{number}.{part}_proj.weight") for part in ("gate", "up", "down")}
                for number in range(model.experts.num_experts)
            ]
            tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in own])
            tensors[f"{experts}.down_proj"] = torch.stack([one["down"] for one in own])
    return tensors


def _key(kind: str) -> str:
    return "mtp_num_hidden_layers" if "qwen" in kind else "num_nextn_predict_layers"
