"""Folders that are not a checkpoint: one clear line for each kind of sensitivity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ModelError
from tests.checkpoints.helpers import fails, write_config


def test_missing_directory(tmp_path):
    fails(tmp_path / "no", ModelError, "no such model directory", str(tmp_path / "no"))


def test_a_file_instead_of_a_directory(single):
    fails(single / "config.json", ModelError, "is a file", "give the directory")


@pytest.mark.parametrize(
    "content, part",
    [
        (None, "is missing"),
        ("{", "not valid JSON"),
        ("[1]", "JSON list, not an object"),
        ("\xff\xfe", "cannot be read as text"),
    ],
)
def test_bad_config(single, content, part):
    (single / "config.json").unlink()
    if content is not None:
        (single / "config.json").write_bytes(content.encode("latin-1"))
    fails(single, ModelError, "config.json", part)


def test_an_adapter_is_recognised(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    fails(tmp_path, ModelError, "adapter", "merge")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "weights.pt", "model.pth"])
def test_pickle_is_never_loaded(tmp_path, name):
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    fails(tmp_path, ModelError, name, "pickle is never loaded", "convert to safetensors")


def test_gguf_gets_a_hint(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    fails(tmp_path, ModelError, "GGUF", "original checkpoint")
    write_config(tmp_path)
    fails(tmp_path, ModelError, "GGUF", "original checkpoint")


def test_no_weights(tmp_path):
    write_config(tmp_path)
    fails(tmp_path, ModelError, "no safetensors files")


def test_several_files_without_an_index(single):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, single / name)
    assert "scalar" in CheckpointReader(single), "model.safetensors is preferred"
    (single / "model.safetensors").unlink()
    fails(single, CheckpointError, "2 safetensors files", "a.safetensors", "model.safetensors.index.json")
    (single / "b.safetensors").unlink()
    assert CheckpointReader(single).names == ("x",)


def test_a_single_file_beside_a_foreign_index_wins(sharded):
    save_file({"x": torch.zeros(1)}, sharded / "model.safetensors")
    assert CheckpointReader(sharded).names == ("x",)


def set_index(folder: Path, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "content, part",
    [("{", "not valid JSON"), ({}, "no 'weight_map'"), ({"weight_map": []}, "no 'weight_map'"), ([], "not an object")],
)
def test_bad_index(sharded, content, part):
    set_index(sharded, content)
    fails(sharded, CheckpointError, "model.safetensors.index.json", part)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "x.bin", 3]
)
def test_the_index_cannot_name_files_elsewhere(sharded, name):
    set_index(sharded, {"weight_map": {"scalar": name}})
    fails(sharded, CheckpointError, "'scalar'", repr(name), "same folder")


@pytest.mark.parametrize("name", ["a" * 244 + ".safetensors", "a\0.safetensors"], ids=ascii)
def test_the_index_cannot_name_what_no_file_is_called(sharded, name):
    set_index(sharded, {"weight_map": {"x" * 9000: name}})
    with pytest.raises(CheckpointError, match="same folder") as caught:
        CheckpointReader(sharded)
    assert len(str(caught.value)) < 500


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    fails(sharded, CheckpointError, "model-00002-of-00002.safetensors", "is missing", "6 tensors")


def test_a_tensor_that_its_shard_lacks(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    set_index(sharded, index)
    fails(sharded, CheckpointError, "model-00001-of-00002.safetensors", "'ghost'")
