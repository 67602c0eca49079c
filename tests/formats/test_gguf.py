"""GGUF: golden bytes of the gguf library, exact carrying of codes, the K-quant encoders, damaged files."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import is_gguf
from quantkit.formats.ggml.blocks import Block, dequantize_blocks, num_bytes, round_to_blocks
from quantkit.formats.ggml.gguf_file import read_gguf, write_gguf_file
from quantkit.formats.gguf import FORMAT
from tests.formats.schemes import linear, random_tensor

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf.json").read_text())
VALUES = torch.tensor(GOLDEN["values"])
K_QUANTS = {Block.Q2_K: (2, 16), Block.Q3_K: (3, 16), Block.Q4_K: (4, 32), Block.Q5_K: (5, 32), Block.Q6_K: (6, 16)}
"""Bits and values per scale."""


def as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# Blocks


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_rounding_gives_the_bytes_of_the_library(name):
    data = round_to_blocks(VALUES, Block[name])
    assert bytes(data.flatten().tolist()).hex() == GOLDEN["encoded"][name]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_blocks_mean_what_the_library_reads(name):
    case = GOLDEN["decoded"][name]
    values = dequantize_blocks(Block[name], as_bytes(case["blocks"]), (2, 256))
    assert torch.equal(values, as_bytes(case["values"]).view(torch.float32).view(2, 256))


def test_a_type_without_values_is_not_decoded():
    with pytest.raises(CheckpointError, match="type Q8_K, which is not supported"):
        dequantize_blocks(Block.Q8_K, torch.zeros(num_bytes(Block.Q8_K, (256,)), dtype=torch.uint8), (1, 256))


# Our codes


KEPT = [
    ("int4", 32, True, "Q4_0"),
    ("int4", 96, True, "Q4_0"),
    ("int4", None, True, "Q4_0"),
    ("int3", 64, True, "Q4_0"),
    ("int2", 32, True, "Q4_0"),
    ("int8", None, True, "Q8_0"),
    ("int8", 64, True, "Q8_0"),
    ("int5", 32, True, "Q5_0"),
    ("int5", None, True, "Q5_0"),
    ("int6", 256, True, "Q6_K"),
    ("int6", None, True, "Q6_K"),
    ("mxfp4", 32, True, "MXFP4"),
]


@pytest.mark.parametrize(("dtype", "group", "symmetric", "expected"), KEPT)
def test_codes_come_back_exactly(dtype, group, symmetric, expected):
    scheme = linear(dtype, group, symmetric=symmetric)
    width = 512 if expected == "Q6_K" else 192
    weight = random_tensor(0, (24, width), scheme.weight, torch.float16)
    FORMAT.check(scheme, weight.shape)
    block, data = FORMAT.blocks(weight)
    assert block.name == expected
    assert data.shape[0] == 24
    # The library had no part in making the blocks.
    assert torch.equal(dequantize_blocks(block, data, weight.shape), weight.dequantize())


def test_zero_points_go_to_q4_1_where_float16_holds_the_minimum():
    scheme = linear("int4", 32, symmetric=False)
    weight = random_tensor(0, (8, 64), scheme.weight, torch.float16)
    weight.scale.copy_(2.0 ** (torch.arange(16) % 5 - 3).view(8, 2))
    block, data = FORMAT.blocks(weight)
    assert block.name == "Q4_1"
    assert torch.equal(dequantize_blocks(block, data, weight.shape), weight.dequantize())
    parts = data.view(-1, 20)
    assert torch.equal(parts[:, :2].contiguous().view(torch.float16).view(8, 2), weight.scale)
    assert torch.equal(torch.cat([parts[:, 4:] & 15, parts[:, 4:] >> 4], dim=1).view(8, 64), weight.codes + 8)


@pytest.mark.parametrize(("dtype", "expected"), [("int4", "Q5_0"), ("int3", "Q4_0"), ("int2", "Q4_0")])
def test_other_zero_points_keep_every_value(dtype, expected):
    scheme = linear(dtype, 32, symmetric=False)
    weight = random_tensor(0, (24, 96), scheme.weight, torch.float16)
    block, data = FORMAT.blocks(weight)
    assert block.name == expected
    assert torch.equal(dequantize_blocks(block, data, weight.shape), weight.dequantize())


REFUSED = [
    (linear("fp8"), (32, 64), "weights.dtype"),
    (linear("int8", 32, symmetric=False), (32, 64), "weights.symmetric=true"),
    (linear("int4", 16), (32, 64), "group_size"),
    (linear("int4"), (32, 172), "172 inputs"),
    (linear("int8", inputs="int8"), (32, 64), "activations"),
    (linear("int5", 32, symmetric=False), (32, 64), "int5 g32 asym"),
    (linear("int6", 64), (32, 512), "256 or channel, or weights.dtype to int5 or int8"),
    (linear("int6"), (32, 96), "one scale per 256 inputs"),
    (linear("nvfp4"), (32, 64), "not nvfp4 g16"),
]


@pytest.mark.parametrize(("scheme", "shape", "message"), REFUSED)
def test_what_no_block_holds_is_refused(scheme, shape, message):
    with pytest.raises(SchemeError, match=message):
        FORMAT.check(scheme, shape)


def test_scales_are_not_rounded_to_float16():
    weight = random_tensor(0, (8, 64), linear("int4", 32).weight, torch.float32)
    with pytest.raises(SchemeError, match=r"scale 0\.\d+ of this weight is not a float16 number.*original model"):
        FORMAT.blocks(weight)
    large = replace(weight, scale=torch.full_like(weight.scale, 70144, dtype=torch.bfloat16))
    with pytest.raises(SchemeError, match=r"scale 70144 of this weight .*ignore this linear"):
        FORMAT.blocks(large)


def test_groups_in_activation_order_are_refused():
    weight = random_tensor(0, (8, 64), linear("int4", 32).weight, torch.float16)
    with pytest.raises(SchemeError, match=r"groups of this weight are in activation order.*act_order=weight"):
        FORMAT.blocks(replace(weight, group_index=torch.arange(64) % 2))


# K-quants


def samples(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 256, generator=generator) * torch.rand(40, 1, generator=generator)
    values[0], values[1], values[2] = 0, 0.3, -0.7
    values[3, 9] = 40
    return values


def plain_rounding_error(values: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Squared error of rounding sub-blocks to nearest, with scales that are not rounded themselves."""
    low, high = (f(values.view(-1, 256 // size, size), -1, keepdim=True) for f in (torch.amin, torch.amax))
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-20)
    rounded = ((values.view_as(low.expand(-1, -1, size)) - low) / step).round() * step + low
    return (rounded.view(values.shape) - values).square().sum(1)


def rounded(block: Block, values: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    return dequantize_blocks(block, round_to_blocks(values, block, importance), values.shape)


@pytest.mark.parametrize("block", K_QUANTS)
def test_k_quants_are_about_as_good_as_free_scales(block):
    values, (bits, size) = samples(0), K_QUANTS[block]
    decoded = rounded(block, values, torch.ones(256))
    error = (decoded - values).square().sum(1)
    assert torch.equal(decoded[0], values[0])
    # Three bits without minimums leave no code for one more step on the longer side.
    assert error.sum() < (1.1 if block == Block.Q3_K else 1.05) * plain_rounding_error(values, bits, size).sum()


@pytest.mark.parametrize("block", K_QUANTS)
def test_importance_moves_the_error_to_where_it_does_not_matter(block):
    values = samples(1)
    importance = torch.where(torch.arange(256) % 32 < 4, 50.0, 1.0)
    plain, weighted = (rounded(block, values, weights) for weights in (torch.ones(256), importance))
    errors = [((decoded - values).square() * importance).sum() for decoded in (plain, weighted)]
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("block", K_QUANTS)
def test_k_quants_of_nothing_and_of_extremes(block):
    assert round_to_blocks(torch.empty(0, 256), block).shape == (0, num_bytes(block, (256,)))
    for scale in (1e-6, 1e4):
        assert torch.isfinite(rounded(block, samples(2) * scale)).all()


# Files


def make_file(path: Path) -> Path:
    path.write_bytes(bytes.fromhex(GOLDEN["file"]))
    return path


def test_a_file_of_the_library_is_read(tmp_path):
    file = read_gguf(make_file(tmp_path / "a.gguf"))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.context_length"] == 64
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "ä", "b"]
    assert file.metadata["tokenizer.ggml.scores"] == [0.0, -1.0, -2.5]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    norm, embedding = file.tensors["output_norm.weight"], file.tensors["token_embd.weight"]
    assert (norm.block, norm.shape) == (Block.F32, (5,))
    assert (embedding.block, embedding.shape) == (Block.Q4_0, (4, 64))
    assert b"".join(file.chunks("token_embd.weight")).hex() == GOLDEN["encoded"]["Q4_0"]


def test_our_bytes_are_those_of_the_library(tmp_path):
    golden = read_gguf(make_file(tmp_path / "a.gguf"))
    tensors = {name: (info.block, info.shape) for name, info in golden.tensors.items()}
    data = [b"".join(golden.chunks(name)) for name in tensors]
    digests = write_gguf_file(
        tmp_path / "b.gguf", golden.metadata, tensors, ([one[:7], memoryview(one)[7:]] for one in data)
    )
    assert list(digests.values()) == [hashlib.sha256(one).hexdigest() for one in data]
    assert (tmp_path / "b.gguf").read_bytes().hex() == GOLDEN["file"]


def test_names_that_gguf_has_no_room_for(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be stored in a GGUF file"):
        write_gguf_file(tmp_path / "a.gguf", {"general.architecture": "llama"}, {"x" * 64: (Block.F32, (1,))}, [])


@pytest.mark.parametrize(
    "value",
    [
        *(1e39, [1.0, -1e39], float("inf"), float("nan"), -1, 2**32, [2**31], 10**400, "\ud800", ["a", "\ud800"]),
        *(["a b", 1], [None], [[1]], [], {}, None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_values_that_gguf_has_no_room_for(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"rope\.freq_base: .* cannot be stored in a GGUF file"):
        write_gguf_file(tmp_path / "a.gguf", {"general.architecture": "llama", "rope.freq_base": value}, {}, [])


@pytest.mark.parametrize("value", [0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_no_count_or_length_is_believed_beyond_the_file(tmp_path, value):
    """Written over every four bytes of the header, as a number of tensors, entries, items, bytes or dimensions."""
    path = make_file(tmp_path / "a.gguf")
    data = path.read_bytes()
    end = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    refused = 0
    tracemalloc.start()
    for position in range(4, end - 8, 4):
        path.write_bytes(data[:position] + value.to_bytes(8, "little") + data[position + 8 :])
        try:
            read_gguf(path)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert refused > (10 if value > 1 else 3)


def test_damaged_files_are_refused_with_the_place(tmp_path):
    path = make_file(tmp_path / "a.gguf")
    data = path.read_bytes()
    for text, broken in [
        ("does not begin with GGUF", b"GGML" + data[4:]),
        ("version 9", data[:4] + b"\x09\0\0\0" + data[8:]),
        ("number of tensors", data[:8] + b"\xff" * 8 + data[16:]),
        ("truncated", data[:-40]),
        ("left", data[:30]),
        ("left", b"GG"),
    ]:
        path.write_bytes(broken)
        assert is_gguf(path)
        with pytest.raises(CheckpointError, match=text):
            read_gguf(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_gguf(tmp_path / "none.gguf")
