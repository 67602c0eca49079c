"""Safetensors files that are damaged: one clear line that names file, tensor and values."""

from __future__ import annotations

import pytest

from quantkit.checkpoints import header as header_module
from quantkit.errors import CheckpointError
from tests.checkpoints.helpers import fails, raw_file, write_config


def entry(dtype: object = "F32", shape: object = None, offsets: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [2] if shape is None else shape,
        "data_offsets": [0, 8] if offsets is None else offsets,
    }


@pytest.mark.parametrize(
    "header, data, parts",
    [
        (b"{", b"", ["the header of", "not valid JSON"]),
        (b"[]", b"", ["a JSON list, not an object"]),
        ({"a": 1}, b"", ["entry of tensor 'a'"]),
        ({"9" * 5000: entry()}, bytes(8), ["a name of 5000 characters"]),
        ({"a": entry(dtype="F4")}, bytes(8), ["'a'", "'F4'", "not supported", "BF16"]),
        ({"a": entry(dtype=None)}, bytes(8), ["'a'", "None", "not a name"]),
        ({"a": entry(shape=[-2])}, bytes(8), ["'a'", "shape [-2]"]),
        ({"a": entry(shape=[True])}, bytes(8), ["'a'", "shape [True]"]),
        ({"a": entry(shape="2")}, bytes(8), ["'a'", "shape '2'"]),
        ({"a": entry(offsets=[0])}, bytes(8), ["'a'", "data_offsets [0]"]),
        ({"a": entry(offsets=[8, 0])}, bytes(8), ["'a'", "need 8 bytes"]),
        ({"a": entry(offsets=[0, 7])}, bytes(7), ["'a'", "7 bytes", "need 8 bytes"]),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), ["'b'", "overlaps tensor 'a'"]),
        ({"a": entry(), "b": entry()}, bytes(8), ["overlaps"]),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20), ["'b'", "gap"]),
        ({"a": entry(offsets=[4, 12])}, bytes(12), ["'a'", "gap after the header"]),
        ({"a": entry()}, bytes(7), ["is truncated"]),
        ({"a": entry()}, bytes(9), ["its tensors end at byte"]),
    ],
)
def test_bad_file(tmp_path, header, data, parts):
    write_config(tmp_path)
    raw_file(tmp_path / "model.safetensors", header, data)
    fails(tmp_path, CheckpointError, "model.safetensors", *parts)


def test_truncation_names_both_sizes(single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    fails(single, CheckpointError, "truncated: its header and tensors take", str(len(data)), str(len(data) - 10))


@pytest.mark.parametrize("keep, part", [(0, "has 0 bytes"), (5, "has 5 bytes"), (20, "its header ends at byte")])
def test_truncated_header(single, keep, part):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails(single, CheckpointError, "truncated", part)


def test_every_truncation_is_noticed(single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    for keep in range(0, len(data), 37):
        path.write_bytes(data[:keep])
        fails(single, CheckpointError, "model.safetensors")


def test_huge_header(single):
    (single / "model.safetensors").write_bytes((header_module.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    fails(single, CheckpointError, "over the limit of 100000000")


def test_git_lfs_pointer(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    fails(single, CheckpointError, "Git LFS pointer", "git lfs pull")
