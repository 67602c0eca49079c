"""Packed weights and their products in Triton's interpreter against the decoded weight in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.formats._unpacked import fp4_values
from quantkit.kernels import gpu, ops
from quantkit.kernels.gpu import choices, quantized_linear, splits, w4a16
from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.gpu.attention import TritonAttention
from quantkit.kernels.gpu.packing import E4M3_BYTES, NUMBERS, find_span, pack, unpacked
from quantkit.kernels.ops import paged_attention
from quantkit.kernels.ops.linear import build_linear, join
from quantkit.kernels.reference import ops as reference
from quantkit.kernels.types import AttentionOptions, LinearSource
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.runtime.model.layers import MLP
from tests.kernels.gpu.interpreted.packed import CPU, check, quantized
from tests.kernels.paged import Sequences, layout

SCHEMES = [
    ("int4", 128, True, (64, 512)),
    ("int4", 32, False, (50, 256)),
    ("int4", None, True, (40, 500)),
    ("int4", 384, True, (16, 768)),
    ("int3", 64, True, (32, 512)),
    ("int8", 64, False, (32, 256)),
    ("int2", 64, False, (16, 1024)),
    ("int6", 64, False, (16, 256)),
    ("fp8", None, True, (40, 500)),
    ("fp8", 128, True, (32, 512)),
    ("nvfp4", 16, True, (48, 256)),
    ("mxfp4", 32, True, (50, 256)),
    ("mxfp8", 32, True, (32, 160)),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_packed_weight_is_the_weight(scheme):
    weight = quantized(*scheme)
    packed = pack(weight, CPU)
    assert torch.equal(w4a16.dequantize_weight(packed, torch.float32), weight.dequantize())


def test_a_step_reads_what_the_checkpoint_stores():
    """No padding where widths are ordinary; zeros take a byte each, 4 bits of it more than on disk."""
    symmetric, shifted = (quantized("int4", 128, flag, (64, 1024)) for flag in (True, False))
    assert pack(symmetric, CPU).num_bytes == symmetric.stored_bytes
    assert pack(shifted, CPU).num_bytes == shifted.stored_bytes + 64 * 8 // 2
    int8 = quantized("int8", None, True, (64, 1024))
    assert pack(int8, CPU).num_bytes == int8.stored_bytes


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_packed_products(scheme, rows):
    weight, bias = quantized(*scheme), torch.randn(scheme[3][0])
    x = torch.randn(rows, scheme[3][1], generator=torch.Generator().manual_seed(rows))
    check(w4a16.multiply(x, pack(weight, CPU), bias), x, weight.dequantize(), bias.double())


@pytest.mark.parametrize("rows", [1, 5])
def test_split_products_and_in_float16(rows):
    """More programs than rows of outputs fill: K is split, and the partials are added in order."""
    weight = quantized("int4", 128, True, (32, 2048))
    assert splits.splits_of(2, pack(weight, CPU).num_blocks, 16) > 1
    x = torch.randn(rows, 2048).to(torch.float16)
    actual = w4a16.multiply(x, pack(weight, CPU), None)
    assert actual.dtype == torch.float16
    check(actual, x, weight.dequantize())
    assert torch.equal(actual, w4a16.multiply(x, pack(weight, CPU), None))


GATED = [
    (("int4", 128, False, (88, 512)), 1, "silu"),
    (("int4", 128, True, (256, 2048)), 5, "gelu_pytorch_tanh"),
    (("nvfp4", 16, True, (48, 256)), 3, "silu"),
    (("int8", None, True, (300, 256)), 17, "silu"),
]


@pytest.mark.parametrize(("scheme", "rows", "activation"), GATED, ids=str)
def test_gates_inside_a_product_are_those_of_a_launch_of_their_own(scheme, rows, activation):
    """To the last bit; widths that end inside a tile, and K split."""
    packed, bias = pack(quantized(*scheme), CPU), torch.randn(scheme[3][0]).half()
    x = torch.randn(rows, scheme[3][1]).half()
    apart = gpu_ops.gated(w4a16.multiply(x, packed, bias), activation)
    assert torch.equal(w4a16.multiply(x, packed, bias, activation), apart)


@pytest.mark.parametrize(("rows", "activation"), [(3, "silu"), (3, "relu"), (choices.TILE_LIMIT + 1, "silu")])
def test_a_feed_forward_layer_opens_its_gates_in_the_product_where_it_can(monkeypatch, rows, activation):
    """Not for an activation that kernels do not have, nor where the weight is dequantized for cuBLAS."""
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    opened = []
    monkeypatch.setattr(ops, "gated", lambda *given: opened.append(1) or reference.gated(*given[:2]))
    up, down = (
        build_linear(quantized("int4", 64, True, shape), dtype=torch.float16, device=CPU)
        for shape in ((128, 64), (64, 64))
    )
    x = torch.randn(rows, 64).half()
    expected = down(reference.gated(up(x), activation))
    torch.testing.assert_close(MLP(up, down, activation, True)(x), expected, rtol=0, atol=0.02)
    assert len(opened) == (rows > 3 or activation == "relu")


TILES = [
    choices.Tile(rows=8, columns=16, warps=1, stages=3, programs=32),
    choices.Tile(rows=16, columns=64, warps=8, stages=1, programs=2),
    choices.Tile(rows=64, columns=32, warps=4, stages=1, programs=1),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_computes_the_same(tile, monkeypatch):
    monkeypatch.setattr(choices, "product_tile", lambda *given: tile)
    weight, x = quantized("int4", 128, False, (40, 1024)), torch.randn(3, 1024)
    linear = quantized_linear.PackedLinear(LinearSource(weight=weight, dtype=torch.float32, device=CPU))
    check(linear(x), x, weight.dequantize())


def test_numbers_of_splits():
    for tiles, blocks, programs in ((1, 7, 100), (3, 28, 40), (500, 8, 100), (1, 1, 9), (10, 64, 1000)):
        count = splits.splits_of(tiles, blocks, programs)
        each = -(-blocks // count)
        assert 1 <= count <= blocks
        assert (count - 1) * each < blocks <= count * each


def test_more_rows_than_tiles_take_the_dequantized_weight():
    weight, bias = quantized("int4", 128, False, (24, 512)), torch.randn(24)
    linear = quantized_linear.PackedLinear(LinearSource(weight=weight, bias=bias, dtype=torch.float32, device=CPU))
    x = torch.randn(choices.TILE_LIMIT + 1, 512)
    check(linear(x), x, weight.dequantize(), bias.double())
    assert linear(x[:0]).shape == (0, 24)


def test_what_build_linear_and_paged_attention_choose(monkeypatch):
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    weight = quantized("int4", 64, True, (32, 256))
    order = torch.randperm(256)
    codes = torch.empty_like(weight.codes)
    codes[:, order] = weight.codes
    index = torch.empty(256, dtype=torch.int64)
    index[order] = torch.arange(256) // 64
    by_activation = dataclasses.replace(weight, codes=codes, group_index=index)
    int8, rounded_int8 = quantized("int8", None, True, (32, 256)), ActivationScheme(dtype=DTYPES["int8"])
    x = torch.randn(2, 256).to(torch.float16)
    for made, activation, kind in (
        (weight, None, quantized_linear.PackedLinear),
        (by_activation, None, None),
        (int8, rounded_int8, quantized_linear.Int8Linear),
    ):
        linear = build_linear(made, activation=activation, dtype=torch.float16, device=CPU)
        assert linear.description.endswith("(Triton)")
        assert kind is None or isinstance(linear, kind)
        inputs = x if activation is None else fake_quantize_inputs(x.float(), activation)
        check(linear(x), inputs, made.dequantize())
    assert "Triton" not in build_linear(weight, dtype=torch.float32, device=CPU).description
    views = Sequences(layout(dim=32, page_size=16, dtype=torch.float16), (3,)).cache()._views[0]
    assert isinstance(paged_attention(views), TritonAttention)


def test_what_cannot_be_packed():
    assert find_span(quantized("int4", 4, True, (16, 256))) is None
    assert find_span(quantized("int4", None, True, (16, 72))) is None  # padding would outweigh it
    # Groups would begin at other pieces of each block.
    assert find_span(quantized("int4", 80, True, (16, 800))) is None
    assert find_span(quantized("int8", 80, True, (16, 400))) is None
    grouped = dataclasses.replace(quantized("int4", 64, True, (16, 256)), group_index=torch.arange(256) // 64)
    assert find_span(grouped) is None


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_every_float_code_is_decoded_exactly(kind):
    """Signs, subnormals, zeros of both signs and the largest; in the products too."""
    dtype = DTYPES[kind]
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every & 127 != 127].view(torch.float8_e4m3fn)
    if dtype.bits == 4:
        every = fp4_values(torch.arange(16, dtype=torch.uint8))
    codes = every.view(torch.uint8).repeat(256)[: 16 * 256].view(16, 256).view(torch.float8_e4m3fn)
    scheme = WeightScheme(dtype=dtype, group_size=dtype.group)
    scale = torch.ones(16, 256 // (dtype.group or 256))
    weight = QuantizedTensor(codes=codes, scale=scale, zero_point=None, scheme=scheme)
    packed = pack(weight, CPU)
    assert torch.equal(w4a16.dequantize_weight(packed, torch.float32), codes.float())
    for rows in (1, 16):
        actual = torch.cat([w4a16.multiply(part, packed, None) for part in torch.eye(256)[:32].split(rows)])
        assert torch.equal(actual, codes.float().t()[:32])


@pytest.mark.parametrize("group", [None, 64])
def test_float_weights_may_hold_nan(group):
    weight = quantized("fp8", group, True, (16, 256))
    weight.codes.view(torch.uint8)[3, 5] = 0x7F
    for rows in (1, 5):
        out = w4a16.multiply(torch.zeros(rows, 256), pack(weight, CPU), None)
        assert out[:, 3].isnan().all()
        assert out.isnan().sum() == rows


def test_scales_of_floats():
    """8 bits where that says the same, float32 where rows have other common scales, 16 bits where these hold them."""
    weight = quantized("nvfp4", 16, True, (16, 256))
    packed = pack(weight, CPU)
    assert packed.num_bytes + 4 == weight.stored_bytes
    assert packed.packing.scales == E4M3_BYTES
    one, other = weight, quantized("nvfp4", 16, True, (24, 256))
    both = join([one, other])
    assert torch.equal(w4a16.dequantize_weight(pack(both, CPU), torch.float32), both.dequantize())
    assert pack(both, CPU).packing.scales == E4M3_BYTES  # the tensors' scales are the same
    apart = join([one, dataclasses.replace(other, scale=other.scale * 3, global_scale=other.global_scale / 3)])
    packed = pack(apart, CPU)
    assert packed.scale.dtype == torch.float32
    assert torch.equal(w4a16.dequantize_weight(packed, torch.float32), apart.dequantize())
    weight = quantized("mxfp4", 32, True, (16, 256))
    assert pack(weight, CPU).num_bytes == weight.stored_bytes
    weight.scale[1, 2] = torch.nan
    assert pack(weight, CPU).packing.scales == NUMBERS
    weight = quantized("fp8", None, True, (16, 256))
    assert pack(weight, CPU).scale.dtype == torch.float16
    large = dataclasses.replace(weight, scale=weight.scale * 60000.0)
    assert pack(large, CPU).scale.dtype == torch.float32
    assert torch.equal(w4a16.dequantize_weight(pack(large, CPU), torch.float32), large.dequantize())
    huge = dataclasses.replace(weight, scale=weight.scale.float() * 1e35)
    assert find_span(huge) is None


def test_unpacked_codes_are_read_where_they_lie():
    x = torch.randn(2, 264)
    for name in ("int8", "fp8"):
        weight = quantized(name, None, True, (16, 264))
        check(w4a16.multiply(x, unpacked(weight), None), x, weight.dequantize())


def test_e4m3_is_rounded_as_by_torch():
    """Every float16 number: all codes, all halfway cases, subnormals, overflow, NaN."""
    from quantkit.kernels.gpu import kv_store
    from quantkit.kernels.reference.kv_codes import _to_fp8

    kernel_layout = layout("fp8", heads=1, dim=64, page_size=16, dtype=torch.float32)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    every = torch.cat([every, torch.linspace(-0.02, 0.02, 1024)]).view(-1, 1, 64)[:512:7]
    views = kernel_layout.views(torch.zeros(64, kernel_layout.page_bytes, dtype=torch.uint8))

    batch = dataclasses.replace(Sequences(kernel_layout, (1,)).batch([(0, 0, 1)]), slots=torch.arange(len(every)))
    kv_store.enter((every, every, every), views, batch, AttentionOptions(scale=1.0), None)
    stored = views.key.codes[:, 0].reshape(-1, 64)[: len(every)]
    assert torch.equal(stored, _to_fp8(every[:, 0]))
