"""Fixtures that many tests share. No network: hub libraries are told so before they are imported."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path

import pytest
import torch

from tests.helpers import TEXT, make_model

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama; not to be changed by tests."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text of 36 short documents."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path
