"""The writer: golden bytes of the safetensors library, all or nothing on disk, and errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoints.reader import CheckpointReader, value_chunks
from quantkit.errors import CheckpointError, OutputError, QuantkitError, ResourceError
from quantkit.output import writer


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.scale": torch.randn(4, 2, generator=generator).bfloat16(),
        "a.packed": torch.randint(-(2**31), 2**31 - 1, (4, 3), generator=generator).int(),
        "a.shape": torch.tensor([4, 24]),
        "c.codes": torch.randint(-128, 127, (3, 5), generator=generator).to(torch.int8),
        "c.fp8": torch.randn(3, 3, generator=generator).to(torch.float8_e4m3fn),
        "d": torch.randn(7, generator=generator),
        "e": torch.tensor(True),
        "f": torch.empty(0, 3, dtype=torch.float16),
        'g\u00fc"': torch.randn(2, dtype=torch.float64, generator=generator),
    }


def test_bytes_are_those_of_the_library(tmp_path, tensors):
    digest = writer.write_shard(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = (tmp_path / "ours.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()
    assert digest == hashlib.sha256(ours).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.safetensors", "theirs.safetensors"]


def test_reads_back_with_the_library(tmp_path, tensors):
    writer.write_shard(tmp_path / "x.safetensors", tensors)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert read.tolist() == tensor.tolist()


def test_order_of_the_mapping_does_not_matter(tmp_path, tensors):
    first = writer.write_shard(tmp_path / "a.safetensors", tensors)
    second = writer.write_shard(tmp_path / "b.safetensors", dict(reversed(tensors.items())))
    assert first == second


def test_views_and_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "value_chunks", partial(value_chunks, size=5))
    base = torch.arange(24).view(4, 6)
    writer.write_shard(tmp_path / "x.safetensors", {"t": base.T, "s": base[1:3, ::2]})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("t"), base.T)
        assert torch.equal(file.get_tensor("s"), base[1:3, ::2])


def test_a_dtype_that_cannot_be_held(tmp_path):
    with pytest.raises(CheckpointError, match=r"'x' has dtype torch\.complex64"):
        writer.write_shard(tmp_path / "x.safetensors", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


def test_copy_tensors_is_byte_for_byte(tmp_path, tensors):
    (tmp_path / "config.json").write_text("{}")
    writer.write_shard(tmp_path / "model.safetensors", tensors)
    reader = CheckpointReader(tmp_path)
    names = [name for name in tensors if name != "d"]
    copied = writer.copy_tensors(reader, names, tmp_path / "out.safetensors")
    direct = writer.write_shard(tmp_path / "direct.safetensors", {name: tensors[name] for name in names})
    assert copied == direct == hashlib.sha256((tmp_path / "out.safetensors").read_bytes()).hexdigest()


def test_copy_of_an_unknown_tensor(tmp_path, tensors):
    (tmp_path / "config.json").write_text("{}")
    writer.write_shard(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="no tensor 'zz'"):
        writer.copy_tensors(CheckpointReader(tmp_path), ["zz"], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_write_json(tmp_path):
    writer.write_json(tmp_path / "x.json", {"b": 1, "a": "\u00fc"})
    assert (tmp_path / "x.json").read_text() == '{\n  "b": 1,\n  "a": "\u00fc"\n}\n'


def test_write_index(tmp_path):
    writer.write_index(tmp_path, {"b": "2.safetensors", "a": "1.safetensors"}, 12)
    text = (tmp_path / "model.safetensors.index.json").read_text()
    assert json.loads(text) == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": "1.safetensors", "b": "2.safetensors"},
    }
    assert text.index('"a"') < text.index('"b"')


# Failure


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_leaves_the_old_file_and_no_temporary_one(tmp_path, tensors, monkeypatch, call):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(ResourceError, match=r"no space left .*x\.safetensors: it needs .* are free; delete files or"):
        writer.write_shard(path, tensors)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_interruption_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.write_json(tmp_path / "x.json", {})
    assert not list(tmp_path.iterdir())


def test_unserialisable_json_leaves_the_old_file(tmp_path):
    (tmp_path / "x.json").write_text("old")
    with pytest.raises(TypeError):
        writer.write_json(tmp_path / "x.json", {"a": object()})
    assert (tmp_path / "x.json").read_text() == "old"


def test_a_missing_folder_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match=r"cannot write .*No such file or directory"):
        writer.write_json(tmp_path / "no" / "x.json", {})


def refused(code: int, *args: Any) -> QuantkitError:
    with pytest.raises(QuantkitError) as error, writer.writing(*args):
        raise OSError(code, os.strerror(code))
    return error.value


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_resource_error(tmp_path, code):
    error = refused(code, tmp_path / "a" / "b", 3 << 30)
    assert isinstance(error, ResourceError)
    assert "needs 3.0 GiB" in str(error)
    assert "run the same command again to resume" in str(error)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EIO])
def test_other_failures_are_output_errors(tmp_path, code):
    error = refused(code, tmp_path / "a")
    assert isinstance(error, OutputError)
    assert os.strerror(code) in str(error)
    assert str(tmp_path / "a") in str(error)
