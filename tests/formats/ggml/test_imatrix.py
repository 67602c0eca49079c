"""Importance matrices: round trip, the older form, damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.formats.ggml.blocks import Block
from quantkit.formats.ggml.gguf_file import read_gguf, write_gguf_file
from quantkit.formats.ggml.imatrix import ImportanceMatrix, read_imatrix, write_imatrix

MATRIX = ImportanceMatrix(
    means={
        "blk.0.ffn_up.weight": torch.tensor([[1.0, 2.0, 4.0]]),
        "blk.0.e.weight": torch.tensor([[1.0, 3.0], [1.0, 1.0]]),
    },
    counts={"blk.0.ffn_up.weight": torch.tensor([64.0]), "blk.0.e.weight": torch.tensor([8.0, 0.0])},
    data="text.txt",
    chunk=16,
)


def test_what_is_written_is_read_back(tmp_path):
    write_imatrix(tmp_path / "a.gguf", MATRIX)
    read = read_imatrix(tmp_path / "a.gguf")
    assert (read.data, read.chunk) == ("text.txt", 16)
    assert all(torch.equal(read.means[name], mean) for name, mean in MATRIX.means.items())
    assert all(torch.equal(read.counts[name], count) for name, count in MATRIX.counts.items())


def test_the_file_has_what_llama_cpp_looks_for(tmp_path):
    write_imatrix(tmp_path / "a.gguf", MATRIX)
    file = read_gguf(tmp_path / "a.gguf")
    assert file.metadata["general.type"] == "imatrix"
    assert file.metadata["imatrix.chunk_count"] == 4
    assert file.metadata["imatrix.chunk_size"] == 16
    assert file.metadata["imatrix.datasets"] == ["text.txt"]
    shapes = {name: (info.block, info.shape) for name, info in file.tensors.items()}
    assert shapes["blk.0.e.weight.in_sum2"] == (Block.F32, (2, 2))
    assert shapes["blk.0.e.weight.counts"] == (Block.F32, (2, 1))
    sums = torch.frombuffer(bytearray(b"".join(file.chunks("blk.0.ffn_up.weight.in_sum2"))), dtype=torch.float32)
    assert sums.tolist() == [64.0, 128.0, 256.0]


def legacy(path: Path, *, calls: int = 4, values: int = 3) -> Path:
    name = b"blk.0.ffn_up.weight"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii3f", calls, values, 4.0, 8.0, 16.0)
    path.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii", 7, 5) + b"a.txt")
    return path


def test_the_older_form(tmp_path):
    read = read_imatrix(legacy(tmp_path / "a.dat"))
    assert read.means["blk.0.ffn_up.weight"].tolist() == [[1.0, 2.0, 4.0]]
    assert read.counts["blk.0.ffn_up.weight"].tolist() == [4.0]
    assert read.data == "a.txt"


def test_every_truncation_of_the_older_form_is_refused(tmp_path):
    data = legacy(tmp_path / "a.dat").read_bytes()
    complete = len(data) - 13  # the name of the text is optional
    for size in (*range(complete), *range(complete + 1, len(data))):
        (tmp_path / "b.dat").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"truncated|not an importance matrix"):
            read_imatrix(tmp_path / "b.dat")
    (tmp_path / "b.dat").write_bytes(data[:complete])
    assert read_imatrix(tmp_path / "b.dat").data == ""


@pytest.mark.parametrize("changes", [{"calls": 0}, {"values": -1}, {"values": 1 << 30}])
def test_numbers_that_cannot_be(tmp_path, changes):
    with pytest.raises(CheckpointError, match=r"calls and|truncated"):
        read_imatrix(legacy(tmp_path / "a.dat", **changes))


def test_other_files_are_refused(tmp_path):
    def written(tensors, contents):
        write_gguf_file(tmp_path / "a.gguf", {"general.architecture": "x"}, tensors, contents)
        return tmp_path / "a.gguf"

    with pytest.raises(CheckpointError, match="so it is not an importance matrix"):
        read_imatrix(written({"a": (Block.F32, (1,))}, [[b"\0" * 4]]))
    with pytest.raises(CheckpointError, match=r"no float32 tensor 'a\.counts'"):
        read_imatrix(written({"a.in_sum2": (Block.F32, (1, 1))}, [[b"\0" * 4]]))
    two = {"a.in_sum2": (Block.F32, (3, 1)), "a.counts": (Block.F32, (2, 1))}
    with pytest.raises(CheckpointError, match="3 rows of sums and 2 counts"):
        read_imatrix(written(two, [[b"\0" * 12], [b"\0" * 8]]))
    negative = [[struct.pack("<f", -1)], [struct.pack("<f", 1)]]
    with pytest.raises(CheckpointError, match="negative or non-finite"):
        read_imatrix(written({"a.in_sum2": (Block.F32, (1, 1)), "a.counts": (Block.F32, (1, 1))}, negative))
    with pytest.raises(CheckpointError, match="cannot read"):
        read_imatrix(tmp_path / "none")
