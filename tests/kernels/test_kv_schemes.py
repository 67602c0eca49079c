"""Caches that a checkpoint asks for: fixed scales per tensor and head, mixed sides, rotated keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.errors import SchemeError
from quantkit.kernels.layouts import KVLayout
from quantkit.numerics.kv_cache import (
    FP8_HEAD,
    FP8_TENSOR,
    FP8_TOKEN,
    INT4_CHANNEL,
    INT4_TOKEN,
    INT8_TOKEN,
    LayerCache,
    find_cache_scheme,
    hadamard,
    scheme_from_dict,
    scheme_to_dict,
)
from quantkit.numerics.scheme import CacheScheme, KVScheme
from tests.kernels.paged import IMPLEMENTATIONS, Sequences, layout, use

PLAIN = CacheScheme()
CACHES = {
    "fp8 per tensor": LayerCache(scheme=KVScheme(key=FP8_TENSOR, value=FP8_TENSOR), key_scale=0.021, value_scale=0.34),
    "fp8 per head": LayerCache(
        scheme=KVScheme(key=FP8_HEAD, value=FP8_HEAD), key_scale=(0.021, 1.7), value_scale=(0.3, 0.004)
    ),
    "int8 per token": LayerCache(scheme=KVScheme(key=INT8_TOKEN, value=INT8_TOKEN)),
    "int4 per token": LayerCache(scheme=KVScheme(key=INT4_TOKEN, value=INT4_TOKEN)),
    "int4 per channel, fp8 values": LayerCache(
        scheme=KVScheme(key=INT4_CHANNEL, value=FP8_HEAD), value_scale=(0.3, 2.0)
    ),
    "fp8 per token, int4 values": LayerCache(scheme=KVScheme(key=FP8_TOKEN, value=INT4_TOKEN)),
    "keys ignored": LayerCache(scheme=KVScheme(value=INT4_TOKEN)),
    "rotated int4": LayerCache(scheme=KVScheme(key=INT4_TOKEN, value=INT4_TOKEN, rotation="hadamard")),
    "rotated int8": LayerCache(scheme=KVScheme(key=INT8_TOKEN, value=INT8_TOKEN, rotation="hadamard")),
}
STEPS = [[(0, 0, 9), (1, 0, 3)], [(0, 9, 10), (1, 3, 4)], [(0, 10, 11), (1, 4, 13)], [(1, 13, 14)], [(0, 11, 17)]]


def sequences(cache: LayerCache, dtype=torch.float32, dim=16) -> Sequences:
    shape = KVLayout(num_heads=2, head_dim=dim, page_size=4, dtype=dtype, cache=cache)
    return Sequences(shape, (17, 14), query_heads=4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_attended_to_is_what_the_cache_keeps(implementation, name, dtype, monkeypatch):
    use(implementation, monkeypatch)
    given = sequences(CACHES[name], dtype)
    cache = given.cache()
    bound = {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for spans in STEPS:
        for out, span in zip(given.step(cache, spans), spans, strict=True):
            torch.testing.assert_close(out.double(), given.expected(*span), **bound)


def test_a_scale_of_one_head_is_not_that_of_another():
    given = sequences(CACHES["fp8 per head"])
    swapped = dataclasses.replace(given.layout, cache=dataclasses.replace(given.layout.cache, key_scale=(1.7, 0.021)))
    other = dataclasses.replace(given, layout=swapped)
    first, second = given.cache(), other.cache()
    for spans in STEPS[:2]:
        actual, wrong = given.step(first, spans), other.step(second, spans)
    assert max((a - b).abs().max() for a, b in zip(actual, wrong, strict=True)) > 1e-3


@pytest.mark.parametrize("dim", [16, 64, 96, 80, 6])
def test_rotation_is_orthogonal_and_neutral_without_rounding(dim):
    turn = hadamard(dim)
    torch.testing.assert_close(turn @ turn, torch.eye(dim), rtol=0, atol=1e-6)
    plain, turned = (sequences(LayerCache(scheme=KVScheme(rotation=kind)), dim=dim) for kind in ("none", "hadamard"))
    first, second = plain.cache(), turned.cache()
    for spans in STEPS:
        for a, b in zip(plain.step(first, spans), turned.step(second, spans), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    stored = [cache._views[0].key.codes for cache in (first, second)]
    assert not torch.equal(stored[0].nan_to_num(), stored[1].nan_to_num())


def test_rotation_spreads_an_outlier():
    """One key channel far above the rest: what is attended to is nearer with the rotation than without."""
    errors = {}
    for kind in ("none", "hadamard"):
        given = sequences(LayerCache(scheme=KVScheme(key=INT4_TOKEN, rotation=kind)), dim=64)
        for number, key in enumerate(given.key):
            key[..., 3] *= 30
            given.query[number][..., 3] /= 30
        cache = given.cache()
        given.step(cache, STEPS[0])
        out = given.step(cache, [(0, 9, 10)])[0]
        exact = Sequences.expected(dataclasses.replace(given, layout=layout(dim=64)), 0, 9, 10)
        errors[kind] = (out.double() - exact).norm()
    assert errors["hadamard"] < errors["none"] / 2


def test_fixed_scales_take_no_byte_of_a_page():
    pages = [layout(cache=CACHES[name]).page_bytes for name in ("fp8 per tensor", "fp8 per head")]
    assert pages == [layout("fp8").page_bytes] * 2


@pytest.mark.parametrize("name", CACHES)
def test_schemes_survive_plain_data(name):
    scheme = CACHES[name].scheme
    assert scheme_from_dict(scheme_to_dict(scheme)) == scheme


def test_what_no_cache_keeps_is_refused():
    with pytest.raises(SchemeError, match="a KV cache cannot store values as int4 per channel"):
        find_cache_scheme("values", "int4", "channel")
    with pytest.raises(SchemeError, match="KV cache rotation 'random' is not supported"):
        scheme_from_dict({"rotation": "random"})
    with pytest.raises(SchemeError, match="KV cache keys are 'int4'; expected a mapping with dtype and granularity"):
        scheme_from_dict({"keys": "int4"})
