"""Folders that are not a checkpoint: one clear line for each kind of sensitivity."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoints.folder import resolve
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
    fails(tmp_path, ModelError, "adapter", "--adapter")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "weights.pt", "model.pth"])
def test_pickle_is_never_loaded(tmp_path, name):
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    fails(tmp_path, ModelError, name, "never loads pickle files", "convert it to safetensors")


def test_gguf_gets_a_hint(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    fails(tmp_path, ModelError, "GGUF", "give the path of a GGUF file")
    write_config(tmp_path)
    fails(tmp_path, ModelError, "GGUF", "give the path of a GGUF file")


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


def refuse_download(*args: object, **kwargs: object) -> str:
    raise AssertionError("the hub must not be asked")


def test_a_directory_is_returned_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse_download)
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name").resolve() == tmp_path / "org" / "name", "a directory wins over a hub id"


@pytest.mark.parametrize("model", ["./model", "/nowhere/model", "a/b/c", "~/nowhere-at-all", "model/", "..x"])
def test_paths_never_reach_the_hub(model, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse_download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such model directory"):
        resolve(model)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "model.onnx"))


def test_the_hub_is_asked_for_safe_files_only(tmp_path, monkeypatch):
    asked: dict[str, list[str]] = {}

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(allow=allow_patterns, ignore=ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/model-1.5B") == tmp_path

    def downloads(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow"])
        return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in asked["ignore"])

    for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt", "LICENSE"):
        assert downloads(name), name
    for name in ("pytorch_model.bin", "model.pt", "modeling_x.py", "tokenizer.py", "original/x.safetensors", "x.gguf"):
        assert not downloads(name), name


@pytest.mark.parametrize("error", [OSError("offline"), ValueError("bad id"), RuntimeError("a\nb"), KeyError()])
def test_every_failure_of_the_hub_is_one_line(monkeypatch, error):
    def download(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        resolve("org/model")
    assert "\n" not in str(caught.value)
    assert "'org/model' is not a local directory" in str(caught.value)
    assert "give a directory" in str(caught.value)
