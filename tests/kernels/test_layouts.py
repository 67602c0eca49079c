"""Bytes of a page: golden sizes, ratios, alignment, no overlap; codes and scales against each type's definition."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import SchemeError
from quantkit.kernels.layouts import (
    kv_dtype,
    kv_scheme,
    page_bytes,
    pages_for_budget,
    residual_bytes,
)
from quantkit.kernels.reference.kv_codes import codes_of, decode_states, pack_codes, unpack_codes
from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, MAX_ROLLBACK
from quantkit.numerics.dtype import FP8, INT2, INT3, INT4, INT8
from quantkit.numerics.scheme import CacheScheme, KVScheme
from tests.kernels.paged import KV_TYPES, layout

INT4_TOKEN = CacheScheme(dtype=INT4, granularity="token", symmetric=False)
INT4_CHANNEL = CacheScheme(dtype=INT4, granularity="channel", symmetric=False)
INT3_CHANNEL = CacheScheme(dtype=INT3, granularity="channel", symmetric=False)
INT3_TOKEN = CacheScheme(dtype=INT3)
INT2_TOKEN = CacheScheme(dtype=INT2)
INT8_TOKEN = CacheScheme(dtype=INT8)
INT8_CHANNEL = CacheScheme(dtype=INT8, granularity="channel", symmetric=False)
FP8_TENSOR = CacheScheme(dtype=FP8, granularity="tensor")
FP8_TOKEN = CacheScheme(dtype=FP8)
TYPES = [INT4_TOKEN, INT4_CHANNEL, INT3_CHANNEL, INT8_TOKEN, INT8_CHANNEL, FP8_TENSOR, FP8_TOKEN]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("auto", 2 * 2 * 64 * 128 * 2),
        ("fp8", 2 * 2 * 64 * 128),
        ("int8", 2 * (64 * 128 + 128 * 4) + 2 * 64 * (128 + 2)),
        ("int4", 2 * (64 * 64 + 128 * 4) + 2 * (64 * 64 + 64 * 4)),
        ("k4v3", 2 * (64 * 64 + 128 * 4) + 2 * (64 * 48 + 64 * 2)),
        ("k3v2", 2 * (64 * 48 + 128 * 4) + 2 * (64 * 32 + 64 * 2)),
    ],
)
def test_bytes_of_a_page(kind, expected):
    assert layout(kind, heads=2, dim=128, page_size=64, dtype=torch.bfloat16).page_bytes == expected


@pytest.mark.parametrize(("kind", "ratio"), [("fp8", 1.9), ("int8", 1.9), ("int4", 3.5), ("k4v2", 4.7)])
@pytest.mark.parametrize("dim", [64, 128])
def test_ratio_to_16_bits(kind, ratio, dim):
    sizes = [layout(k, dim=dim, page_size=DEFAULT_PAGE_SIZE, dtype=torch.bfloat16).page_bytes for k in ("auto", kind)]
    assert sizes[0] / sizes[1] >= ratio


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("dim", [8, 16, 80, 96])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_blocks_are_aligned_and_do_not_overlap(kind, dim, page_size):
    shape = layout(kind, heads=3, dim=dim, page_size=page_size)
    end = 0
    for block in shape.blocks().values():
        assert block.offset % 16 == 0
        assert end <= block.offset < end + 16
        end = block.offset + block.num_bytes
    assert end <= shape.page_bytes < end + 16


@pytest.mark.parametrize("kind", KV_TYPES)
def test_views_share_the_pool_and_cover_each_block(kind):
    shape = layout(kind, dim=80)
    pool = torch.zeros(3, shape.page_bytes, dtype=torch.uint8)
    views = shape.views(pool)
    for name, block in shape.blocks().items():
        side, _, what = name.partition("_")
        array = getattr(getattr(views, side), what or "codes")
        assert array.shape == (3, *block.shape)
        array[1].view(torch.uint8).fill_(1)
    assert pool[1].sum() == sum(block.num_bytes for block in shape.blocks().values())
    assert pool[0].sum() == pool[2].sum() == 0


def test_budget_is_spent_on_tails_and_whole_pages():
    layouts = [layout("int4"), layout("int8"), layout()]
    tails = residual_bytes(layouts, 5)
    assert tails == 2 * 2 * 5 * (4 + MAX_ROLLBACK) * 2 * 16 * 4  # keys and values of int4 and of int8
    assert pages_for_budget(layouts, 5, tails + 7 * page_bytes(layouts)) == 7
    assert pages_for_budget(layouts, 5, tails + 7 * page_bytes(layouts) - 1) == 6
    assert pages_for_budget(layouts, 5, tails - 1) == 0


def test_a_channel_with_a_large_bias_costs_the_others_nothing():
    """As in Qwen2, whose key projections have biases of 100 and more."""
    keys = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    keys[:, 3] += 100
    errors = {}
    for scheme in (kv_scheme("int8").key, INT8_TOKEN):
        errors[scheme] = (decode_states(*codes_of(keys, scheme), scheme, torch.float32) - keys).square().mean().sqrt()
    assert errors[INT8_CHANNEL] < 0.01 < 0.2 < errors[INT8_TOKEN]
    assert kv_scheme("int8", latent=True) == KVScheme(key=INT8_TOKEN, value=INT8_TOKEN)


def test_int4_nibbles_are_the_halves_of_a_head():
    codes = torch.tensor([[1, 2, 3, 12, 13, 14]], dtype=torch.uint8)
    assert pack_codes(codes, 4).tolist() == [[0xC1, 0xD2, 0xE3]]
    assert torch.equal(unpack_codes(pack_codes(codes, 4), 4), codes)


def test_codes_of_two_and_three_bits_are_packed_by_quarters_and_eighths():
    codes = torch.tensor([[0, 1, 2, 3, 3, 2, 1, 0]], dtype=torch.uint8)
    assert pack_codes(codes, 2).tolist() == [[0b01_11_10_00, 0b00_10_11_01]]
    codes = torch.arange(8, dtype=torch.uint8).view(1, 8)
    assert pack_codes(codes, 3).tolist() == [[0b10_00_10_00, 0b11_01_11_01, 0b11110000]]
    generator = torch.Generator().manual_seed(0)
    for bits in (2, 3, 4):
        codes = torch.randint(1 << bits, (5, 3, 48), generator=generator, dtype=torch.uint8)
        assert torch.equal(unpack_codes(pack_codes(codes, bits), bits), codes)
        assert pack_codes(codes, bits).shape == (5, 3, 6 * bits)


@pytest.mark.parametrize(("scheme", "least", "most"), [(INT2_TOKEN, 0.11, 0.15), (INT3_TOKEN, 0.03, 0.042)])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 3e3])
def test_rotated_values_lose_what_their_bits_allow(scheme, least, most, spread):
    """Uniform steps lose at least 0.119 and 0.0374 of the mean square of normally distributed numbers."""
    values = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)) * spread
    values[:, 3] *= 30  # an outlier channel, which would widen the range that all share
    values += 2 * spread  # what all channels have in common must not end up in one channel, and be clipped there
    decoded = decode_states(*codes_of(values, scheme), scheme, torch.float32)
    assert least < ((decoded - values).square().mean() / values.square().mean()).item() < most


@pytest.mark.parametrize("scheme", [INT2_TOKEN, INT3_TOKEN])
@pytest.mark.parametrize("width", [8, 24, 80, 256])
def test_rotated_values_of_any_width_and_none_at_all(scheme, width):
    values = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1))
    values[0, 0] = 0
    decoded = decode_states(*codes_of(values, scheme), scheme, torch.float32)
    assert torch.isfinite(decoded).all()
    assert decoded[0, 0].abs().max() < 1e-5
    assert (decoded - values).norm() < 0.5 * values.norm()


@pytest.mark.parametrize("scheme", TYPES, ids=lambda s: f"{s.dtype.name}-{s.granularity}")
@pytest.mark.parametrize("spread", [1e-6, 1.0, 3e3])
def test_no_error_exceeds_half_a_step(scheme, spread):
    if scheme is FP8_TENSOR and spread > 20:
        spread = 20.0  # what a scale of 1.0 can hold
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 2, 16, 24, generator=generator) * spread
    values += 5 * spread * torch.randn(3, 2, 1, 24, generator=generator)
    values[0, 0, 0] = 0
    codes, scale, zero = codes_of(values, scheme)
    decoded = decode_states(codes, scale, zero, scheme, torch.float32)
    error = (decoded.double() - values.double()).abs()
    axis = -2 if scheme.granularity == "channel" else -1
    if scheme.dtype is FP8:
        unit = 1.0 if scale is None else scale.double().unsqueeze(axis)
        # half a unit of three mantissa bits, of the value or of the smallest normal number
        bound = torch.maximum(values.double().abs() / 16, torch.full_like(error, 2.0**-10) * unit)
    else:
        bound = scale.double().unsqueeze(axis) / 2
        if not scheme.symmetric:
            covered = scale.double() * (254 if scheme.dtype is INT8 else scheme.dtype.full_range)
            needed = (values.amax(axis) - values.amin(axis)).double()
            # fp16: a step is wider than needed only by the rounding of scale and zero
            slack = values.double().abs().amax(axis) * 2**-9 + covered * 2**-9 + 256 * 2.0**-24
            assert (covered <= needed + slack).all()
    assert (error <= bound * 1.001 + 1e-9).all()


def test_fp8_clamps_instead_of_overflowing():
    codes, _, _ = codes_of(torch.tensor([[1e6, -1e6, 500.0, 448.0]]), FP8_TENSOR)
    assert decode_states(codes, None, None, FP8_TENSOR, torch.float32).tolist() == [[448.0, -448.0, 448.0, 448.0]]


def test_fixed_of_the_checkpoint_is_used():
    values = torch.tensor([[1000.0, -3.0]])
    codes, _, _ = codes_of(values, FP8_TENSOR, 4.0)
    assert decode_states(codes, None, None, FP8_TENSOR, torch.float32, 4.0).tolist() == [[1024.0, -3.0]]


def test_names_of_kv_types():
    assert [kv_scheme(name) for name in ("auto", "bf16", "fp16", "fp32")] == [KVScheme()] * 4
    assert kv_scheme("int4") == KVScheme(key=INT4_CHANNEL, value=INT4_TOKEN)
    assert kv_scheme("k3v2") == KVScheme(key=INT3_CHANNEL, value=INT2_TOKEN)
    assert kv_dtype("bf16", torch.float32) is torch.bfloat16
    assert kv_dtype("int8", torch.float32) is torch.float32
    with pytest.raises(SchemeError, match=r"unknown KV cache type 'fp9' \(did you mean 'fp8'\?\); supported: auto"):
        kv_scheme("fp9")


def test_impossible_layouts_are_refused():
    with pytest.raises(SchemeError, match="int4 keys need a number of channels that fills whole bytes, not 7"):
        layout("int4", dim=7)
