"""Small adapters in PEFT's format, for tests; written without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.models.families import find

LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}


def open_model(model: Path) -> ModelReader:
    """A reader of a model's values."""
    reader = open_dense(model)
    return ModelReader.of(reader, find(reader.config))


def random_tensors(reader: ModelReader, linears: tuple[str, ...] = LINEARS, *, rank: int = 4) -> dict[str, Tensor]:
    """A and B of some linears of every layer: random, and large enough to change the model."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in reader.names:
        if name.removesuffix(".weight").endswith(linears):
            outputs, inputs = reader.info(name).shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 50
    return tensors


def write_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Write an adapter of these tensors; `config` changes the entries of CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_adapter(
    folder: Path, model: Path, linears: tuple[str, ...] = LINEARS, *, rank: int = 4, **config: Any
) -> Path:
    """Write a random adapter of a model."""
    return write_adapter(folder, random_tensors(open_model(model), linears, rank=rank), r=rank, **config)
