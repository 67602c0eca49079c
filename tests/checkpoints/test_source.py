"""resolve: directories as they are, hub ids through the hub's library, never pickles, failures in one line."""

from __future__ import annotations

import fnmatch

import huggingface_hub
import pytest

from quantkit.checkpoints.source import resolve
from quantkit.errors import ModelError


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
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "model.gguf"))


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
    assert "'org/model' is no directory here" in str(caught.value)
    assert "give a directory" in str(caught.value)
