"""CheckpointReader: exact bytes, nothing but what was asked for, and one clear line for every kind of sensitivity."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from quantkit.checkpoints.folder import metadata_files
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError
from tests.checkpoints.helpers import DTYPES, raw_file, write_config


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_is_read_exactly(kind, request, tensors):
    reader = CheckpointReader(request.getfixturevalue(kind))
    assert reader.names == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        info = reader.info(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert info.num_bytes == tensor.numel() * tensor.element_size()
        assert same(reader.tensor(name), tensor), name
        assert b"".join(reader.chunks(name, 3)) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert "scalar" in reader
    assert "nothing" not in reader
    assert reader.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert len(reader.files) == (1 if kind == "single" else 2)
    assert reader.config == {"architectures": ["X"]}


def test_a_tensor_is_a_copy(single):
    reader = CheckpointReader(single)
    reader.tensor("scalar").fill_(9)
    assert reader.tensor("scalar").item() == 3.5


def test_an_unknown_tensor_gets_a_suggestion(single):
    with pytest.raises(CheckpointError, match=r"no tensor 'scaler' .did you mean 'scalar'"):
        CheckpointReader(single).tensor("scaler")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(single, tensors, dtype):
    name = f"t.{str(dtype).removeprefix('torch.')}"
    reader = CheckpointReader(single)
    for start, stop in [(0, 7), (2, 5), (3, 3), (6, 7)]:
        assert same(reader.rows(name, start, stop), tensors[name][start:stop])


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 8)])
def test_rows_outside_are_refused(single, start, stop):
    with pytest.raises(CheckpointError, match=f"'t.int8' has 7 rows; rows {start} to {stop - 1} were requested"):
        CheckpointReader(single).rows("t.int8", start, stop)


def test_rows_of_a_number_are_refused(single):
    with pytest.raises(CheckpointError, match="has no rows"):
        CheckpointReader(single).rows("scalar", 0, 1)


@pytest.mark.parametrize("chunk", [1, 12, 1 << 22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_rows(single, tensors, dtype, chunk, monkeypatch):
    monkeypatch.setattr("quantkit.checkpoints.reader.CHUNK_BYTES", chunk)
    name = f"t.{str(dtype).removeprefix('torch.')}"
    reader = CheckpointReader(single)
    generator = torch.Generator().manual_seed(1)
    for shape in [(1,), (4, 6), (0,), (2, 0)]:
        indices = torch.randint(0, 7, shape, generator=generator)
        expected = tensors[name].float()[indices].to(dtype)
        assert same(reader.gather_rows(name, indices), expected)


def test_gather_reads_only_the_rows_asked_for(single, monkeypatch):
    reader, sizes = CheckpointReader(single), []
    from quantkit.checkpoints import reader as module

    read = module._read
    monkeypatch.setattr(module, "_read", lambda *args: sizes.append(args[3]) or read(*args))
    reader.gather_rows("t.float32", torch.tensor([6, 2, 3, 6]))
    assert sizes == [2 * 5 * 4, 1 * 5 * 4]


@pytest.mark.parametrize("index", [-1, 7])
def test_gather_outside_is_refused(single, index):
    with pytest.raises(CheckpointError, match=f"'t.int8' has 7 rows; rows {min(0, index)} to {max(0, index)} were"):
        CheckpointReader(single).gather_rows("t.int8", torch.tensor([0, index]))


def test_resident_memory_stays_small(tmp_path):
    """Sixteen tensors of 8 MiB are read one after the other; a memory map would keep all 128 MiB resident."""
    write_config(tmp_path)
    size = 8 << 20
    header = {f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i in range(16)}
    raw_file(tmp_path / "model.safetensors", header)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + 16 * size)
    reader = CheckpointReader(tmp_path)
    reader.tensor("t0")
    before = resident_bytes()
    for name in reader.names:
        reader.tensor(name)
    assert resident_bytes() - before < 8 * size  # malloc keeps a few of them


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_digests(sharded):
    (sharded / "tokenizer.json").write_text("{}")
    reader = CheckpointReader(sharded)
    names = {"config.json", "tokenizer.json", "model.safetensors.index.json", *(path.name for path in reader.files)}
    expected = {name: hashlib.sha256((sharded / name).read_bytes()).hexdigest() for name in names}
    assert reader.digests == expected
    (sharded / "tokenizer.json").write_text("[]")
    assert reader.digests == expected, "remembered"
    assert CheckpointReader(sharded).digests != expected


def test_metadata_files_are_neither_weights_nor_code(single):
    carried = ["LICENSE.txt", "NOTICE", "chat_template.jinja", "generation_config.json", "merges.txt", "sp.model"]
    carried += ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json"]
    others = ["tokenizer.py", "tokenizer.pkl", "pytorch_model.bin", "model.safetensors.index.json", "modeling.py", "x"]
    for name in carried + others:
        (single / name).write_text("{}")
    (single / "tokenizer_files").mkdir()
    (single / "model.safetensors.index.json").unlink()
    assert [path.name for path in metadata_files(single)] == sorted(carried)


def test_symlinks_of_the_hub_cache_are_followed(tmp_path, single, tensors):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (blobs / f"{name}-hash").write_bytes((single / name).read_bytes())
        (snapshot / name).symlink_to(Path("../../blobs") / f"{name}-hash")
    assert same(CheckpointReader(snapshot).tensor("scalar"), tensors["scalar"])


def test_an_already_quantized_model_can_be_read(single):
    write_config(single, {"quantization_config": {"quant_method": "gptq"}})
    assert "quantization_config" in CheckpointReader(single).config


def test_a_file_that_shrinks_while_it_is_read(single):
    reader = CheckpointReader(single)
    with (single / "model.safetensors").open("r+b") as file:
        file.truncate(reader.info("t.int8").offset + 1)
    with pytest.raises(CheckpointError, match="34 bytes early"):
        reader.tensor("t.int8")
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        reader.tensor("t.int8")
