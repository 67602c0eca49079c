"""Attention in C against plain torch: the same bits in the pool, outputs within rounding, at sizes of real models."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from quantkit.kernels import cpu
from quantkit.kernels.cpu.attention import NativeAttention
from quantkit.kernels.ops import Stepwise
from quantkit.kernels.reference.attention import TorchAttention
from quantkit.kernels.reference.kv_codes import codes_of
from quantkit.kernels.types import AttentionOptions
from quantkit.models.kv_sizes import MAX_ROLLBACK
from quantkit.numerics.dtype import FP8
from quantkit.numerics.kv_cache import LayerCache
from quantkit.numerics.scheme import CacheScheme, KVScheme
from quantkit.runtime.cache.kv_cache import KVCache
from tests.kernels.paged import KV_TYPES, LENGTHS, STEPS, Sequences, layout, poison

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.status())


def pair(sequences: Sequences) -> tuple[KVCache, KVCache]:
    """Two caches, one for each implementation."""
    first, second = sequences.cache(), sequences.cache()
    assert isinstance(first.attention[0].inner, NativeAttention)
    second.attention = {n: Stepwise(TorchAttention(views)) for n, views in second._views.items()}
    return first, second


def assert_same_memory(first: KVCache, second: KVCache) -> None:
    assert torch.equal(first._pools[0], second._pools[0])
    for residual, other in zip(first._residuals, second._residuals, strict=True):
        assert torch.equal(residual.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("dim", [16, 80, 24])
def test_both_store_the_same_bits(dtype, kept, kind, dim):
    """Model and pages in any dtype; a zero key, tiny values and an outlier among them."""
    sequences = Sequences(layout(kind, dim=dim, dtype=kept), LENGTHS)
    for states in (sequences.query, sequences.key, sequences.value):
        states[:] = [tensor.to(dtype) for tensor in states]
    sequences.key[0][3] = 0
    sequences.value[2][5] *= 1e-7
    sequences.key[1][8] *= 300
    first, second = pair(sequences)
    for spans in STEPS:
        actual, expected = sequences.step(first, spans), sequences.step(second, spans)
        for out, other in zip(actual, expected, strict=True):
            if dtype is torch.float32:  # in bf16 scores of 1000 differ by more than one
                torch.testing.assert_close(out, other, rtol=2**-6, atol=2e-3)
        assert_same_memory(first, second)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("fixed", [1.0, 0.37])
def test_every_fp8_code_and_every_border_between_two(token, fixed):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8.storage).float()
    codes = codes[codes.isfinite()].sort().values * fixed
    borders = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, borders, torch.nextafter(borders, codes[1:]), torch.tensor([1e9, -1e9, 0.0])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64)
    scheme = CacheScheme(dtype=FP8, granularity="token" if token else "tensor")
    shape = dataclasses.replace(
        layout(heads=1, dim=64, page_size=len(values)),
        cache=LayerCache(scheme=KVScheme(key=scheme, value=scheme), key_scale=fixed, value_scale=fixed),
    )
    sequences = Sequences(shape, (len(values),), query_heads=1)
    sequences.key[0] = sequences.value[0] = values
    cache = sequences.cache()
    sequences.step(cache, [(0, 0, len(values))])
    expected, scale, _ = codes_of(values, scheme, fixed)
    page = sequences.pages[0][0]
    assert torch.equal(cache._views[0].value.codes[page], expected.transpose(0, 1))
    if token:
        assert torch.equal(cache._views[0].value.scale[page], scale.transpose(0, 1))


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize(("dim", "heads", "query_heads"), [(64, 2, 16), (128, 1, 4), (64, 3, 3), (32, 1, 40)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"])
def test_real_sizes(kind, dim, heads, query_heads, window, dtype, bound):
    """Pages of 64 tokens, long prompts in chunks, groups of one to forty query heads, verification of five tokens."""
    sequences = Sequences(
        layout(kind, dim=dim, heads=heads, page_size=64, dtype=dtype), (330, 140), query_heads=query_heads
    )
    first, second = pair(sequences)
    options = {"window": window, "scale": 0.3 * dim**-0.5}
    steps = [
        [(0, 0, 257)],
        [(0, 257, 320), (1, 0, 127)],
        [(1, 127, 132), (0, 320, 321)],
        [(0, 321, 330), (1, 132, 140)],
    ]
    for spans in steps:
        actual, expected = sequences.step(first, spans, **options), sequences.step(second, spans, **options)
        torch.testing.assert_close(torch.cat(actual), torch.cat(expected), rtol=0, atol=bound)
        assert_same_memory(first, second)


def test_slices_of_a_fused_projection_are_read_in_place():
    sequences = Sequences(layout(), (9,))
    options = AttentionOptions(scale=0.25)
    fused = torch.cat([s[0].flatten(1) for s in (sequences.query, sequences.key, sequences.value)], dim=1)
    query, key, value = (part.unflatten(1, (-1, 16)) for part in fused.split([64, 32, 32], dim=1))
    assert not query.is_contiguous()
    actual = sequences.cache().attention[0]((query, key, value), sequences.batch([(0, 0, 9)]), options)
    assert torch.equal(actual, sequences.step(sequences.cache(), [(0, 0, 9)], scale=0.25)[0])
    assert actual.is_contiguous()


def test_heads_that_are_not_dense_are_copied():
    sequences = Sequences(layout(), (9,))
    cache = sequences.cache()
    states = [
        s[0].transpose(0, 1).contiguous().transpose(0, 1) for s in (sequences.query, sequences.key, sequences.value)
    ]
    actual = cache.attention[0](states, sequences.batch([(0, 0, 9)]), AttentionOptions(scale=0.25))
    assert torch.equal(actual, sequences.step(sequences.cache(), [(0, 0, 9)], scale=0.25)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dim", [64, 256])
def test_a_token_has_the_same_bits_alone_and_among_others(dtype, window, dim):
    """In an unquantized cache. Speculation relies on it: verified drafts give the text that plain steps give."""
    sequences = Sequences(layout(dim=dim, page_size=16, dtype=dtype), (150, 71), query_heads=16)
    options = {"window": window, "scale": 0.3 * dim**-0.5}

    def outputs(spans):
        cache = sequences.cache()
        sequences.step(cache, [(0, 0, 120), (1, 0, 61)], **options)
        return [torch.cat(sequences.step(cache, [span], **options)) for span in spans]

    for sequence, start, end in ((0, 120, 150), (1, 61, 71)):
        alone = torch.cat(outputs([(sequence, at, at + 1) for at in range(start, end)]))
        cuts = [*range(start, end, MAX_ROLLBACK + 1), end]
        together = outputs([(sequence, a, b) for a, b in itertools.pairwise(cuts)])
        assert torch.equal(torch.cat(together), alone)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_threads_do_not_change_the_result(kind):
    sequences = Sequences(layout(kind, dim=64, page_size=64), (400, 300), query_heads=8)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = sequences.cache()
            outs = sequences.step(cache, [(0, 0, 399), (1, 0, 299)]) + sequences.step(
                cache, [(0, 399, 400), (1, 299, 300)]
            )
            results.append((torch.cat(outs), cache._pools[0]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_nan_of_the_model_is_not_hidden():
    for kind in KV_TYPES:
        sequences = Sequences(layout(kind), (6,))
        sequences.value[0][2] = torch.nan
        cache = poison(sequences.cache())
        assert sequences.step(cache, [(0, 0, 5)])[0][-1].isnan().all()
