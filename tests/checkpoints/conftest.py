"""Small checkpoints, whole and in two files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.helpers import make_tensors, write_config


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return make_tensors()


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "single"
    write_config(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "sharded"
    write_config(folder)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
