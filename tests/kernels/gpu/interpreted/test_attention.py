"""Attention in Triton's interpreter: what precedes it, one and several new tokens, splits, every KV type."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
import triton

from quantkit.kernels.gpu import attention as gpu_attention
from quantkit.kernels.gpu import choices, page_store, split_kv, splits
from quantkit.kernels.gpu.attention import TritonAttention, can
from quantkit.kernels.ops import Stepwise
from quantkit.kernels.reference import attention as reference
from quantkit.kernels.reference.attention import TorchAttention
from quantkit.kernels.types import AttentionOptions, HeadNorms
from quantkit.numerics.kv_cache import FP8_HEAD, FP8_TOKEN, INT4_TOKEN, LayerCache
from quantkit.numerics.scheme import KVScheme
from quantkit.runtime.cache import kv_cache
from tests.helpers import one_of_each
from tests.kernels.paged import KV_TYPES, Sequences, layout
from tests.pretended import pretended_gpu

CPU = torch.device("cpu")
BY_HEAD = LayerCache(scheme=KVScheme(key=FP8_HEAD, value=FP8_HEAD), key_scale=(0.021, 1.7), value_scale=(0.3, 0.004))
MIXED = LayerCache(scheme=KVScheme(key=FP8_TOKEN, value=INT4_TOKEN))
IMPLEMENTATIONS = (
    lambda views: Stepwise(TorchAttention(views)),
    lambda views: TritonAttention(views),
)
OPTIONS = {"plain": {}, "all": {"window": 24, "softcap": 4.0}}


KINDS = {**{kind: {"kind": kind} for kind in KV_TYPES}, "by head": {"cache": BY_HEAD}, "mixed": {"cache": MIXED}}


@pytest.mark.parametrize(("kind", "option"), one_of_each(KINDS, OPTIONS))
def test_paged_attention(kind, option, monkeypatch):
    """Prompts, decodes over a page border, a chunk behind: outputs, and every byte that is stored, as by torch."""
    dtype, dim = (torch.float32, 40) if option == "plain" else (torch.float16, 32)
    made, options = Sequences(layout(**KINDS[kind], dim=dim, page_size=16, dtype=dtype), (20, 60)), OPTIONS[option]
    caches, outputs = [], []
    for implementation in IMPLEMENTATIONS:
        monkeypatch.setattr(kv_cache, "paged_attention", implementation)
        caches.append(made.cache())
        out = made.step(caches[-1], [(0, 0, 15), (1, 0, 31)], **options)
        for i in range(2):
            out += made.step(caches[-1], [(0, 15 + i, 16 + i), (1, 31 + i, 32 + i)], **options)
        out += made.step(caches[-1], [(1, 33, 34), (0, 17, 20)], **options)
        outputs.append(out + made.step(caches[-1], [(1, 34, 60)], **options))
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=4e-3 if dtype == torch.float16 else 4e-6, rtol=0)
    assert_same_memory(*caches)


PAGE_TILES = {
    "small": choices.Tile(rows=16, columns=16, warps=2, stages=1, programs=16),
    "large": choices.Tile(rows=128, columns=64, warps=8, stages=3, programs=1),
}


@pytest.mark.parametrize(("kind", "chosen"), one_of_each(["auto", "int4"], PAGE_TILES))
def test_every_tile_reads_pages_alike(kind, chosen, monkeypatch):
    monkeypatch.setattr(choices, "page_tile", lambda *given, **named: PAGE_TILES[chosen])
    made = Sequences(layout(kind, dim=32, page_size=64, dtype=torch.float16), (30, 100))
    outputs = []
    for implementation in IMPLEMENTATIONS:
        monkeypatch.setattr(kv_cache, "paged_attention", implementation)
        cache = made.cache()
        out = made.step(cache, [(0, 0, 29), (1, 0, 70)])
        outputs.append([*out, *made.step(cache, [(1, 70, 99)]), *made.step(cache, [(0, 29, 30), (1, 99, 100)])])
    for actual, expected in zip(*reversed(outputs), strict=True):
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=0)


def assert_same_memory(first, second):
    one, other = ([*cache._pools, *cache._residuals] for cache in (first, second))
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


HEADS = {
    "halves": ("int8", 32, {}),
    "interleaved, part of the channels": ("int4", 24, {"interleaved": True}),
    "norms": ("int4", 24, {"norms": (1e-6, 0.0)}),
    "norms, interleaved, no codes": ("auto", 32, {"norms": (1e-5, 1.0), "interleaved": True}),
    "norms alone": ("fp8", 0, {"norms": (1e-6, 0.0)}),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_are_normed_and_rotated_as_they_are_stored(case, monkeypatch):
    """Chunks, decodes over a page border, alone and beside a chunk: as by one operation after another."""
    kind, rotated, options = HEADS[case]
    dtype = torch.float32 if "norms" in options else torch.float16
    made = Sequences(layout(kind, dim=32, page_size=16, dtype=dtype), (20, 40))
    if "norms" in options:
        query, key = torch.randn(2, 32).unbind(0)
        eps, offset = options["norms"]
        options = {**options, "norms": HeadNorms(query=query, key=key, eps=eps, offset=offset)}
    turns = torch.randn(64, rotated // 2)
    caches, outputs = [], []
    for implementation in IMPLEMENTATIONS:
        monkeypatch.setattr(kv_cache, "paged_attention", implementation)
        caches.append(made.cache())
        outputs.append([])
        for spans in (
            [(0, 0, 15), (1, 0, 31)],
            [(0, 15, 16), (1, 31, 32)],
            [(1, 32, 33), (0, 16, 20)],
            [(1, 33, 40)],
        ):
            at = torch.cat([turns[start:stop] for _, start, stop in spans])
            angles = {"angles": (at.cos(), at.sin())} if rotated else {}
            outputs[-1] += made.step(caches[-1], spans, **options, **angles)
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=4e-3 if dtype == torch.float16 else 4e-6, rtol=0)
    if "norms" not in options:
        assert_same_memory(*caches)


@pytest.mark.parametrize(("kind", "option"), one_of_each(["auto", "int4"], OPTIONS))
def test_long_prefixes_are_split(kind, option):
    """A token, and drafts, after a long prefix, alone and beside a sequence that is too short to be split."""
    shape = layout(kind, dim=32, page_size=16, dtype=torch.float16)
    made, options = Sequences(shape, (250, 20)), OPTIONS[option]
    outputs = []
    for implementation in IMPLEMENTATIONS:
        cache = made.cache()
        cache.attention = [IMPLEMENTATIONS[0](cache._views[0])]
        made.step(cache, [(0, 0, 230), (1, 0, 10)], **options)
        cache.attention = [implementation(cache._views[0])]
        outputs.append([])
        for spans in (
            [(0, 230, 231)],
            [(0, 231, 236)],
            [(0, 236, 237), (1, 10, 11)],
            [(1, 11, 14), (0, 237, 241)],
            [(0, 241, 250), (1, 14, 15)],
        ):
            outputs[-1] += made.step(cache, spans, **options)
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=0)
    assert splits._counters_of.cache_info().currsize == 1, "nothing was split"
    assert not splits.counters(CPU).any()


def test_keys_per_channel_are_stored_in_one_launch(monkeypatch):
    """From inside a page past several, more tokens than the window holds; too few to end a page; single ones."""
    made = Sequences(layout("int4", dim=24, page_size=16, dtype=torch.float16), (100, 30, 20, 20))
    spans, caches = [(0, 21, 100), (1, 3, 7), (2, 5, 6), (3, 15, 16)], []
    batch = made.batch(spans)
    key, value = (
        torch.cat([states[number][start:stop] for number, start, stop in spans]) for states in (made.key, made.value)
    )
    for store in (reference.store_residuals, page_store.store_waiting):
        caches.append(made.cache())
        monkeypatch.setattr(kv_cache, "paged_attention", IMPLEMENTATIONS[0])
        for span in ((0, 0, 20), (0, 20, 21), (1, 0, 3), (2, 0, 5), (3, 0, 15)):
            made.step(caches[-1], [span])
        store(key, value, caches[-1]._views[0], batch)
    assert_same_memory(*caches)


def test_chunks_leave_no_keys_to_torch(monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("torch stores keys, sequence by sequence")

    monkeypatch.setattr(gpu_attention, "store_residuals", refuse)
    monkeypatch.setattr(kv_cache, "paged_attention", TritonAttention)
    made = Sequences(layout("int4", dim=32, page_size=16, dtype=torch.float16), (15, 9))
    outputs = made.step(made.cache(), [(0, 0, 15), (1, 0, 9)])
    assert [len(out) for out in outputs] == [15, 9]


def test_streams_count_apart(monkeypatch):
    """Threads on streams of their own launch at the same time; a stream's counters stay where graphs have them."""
    streams = iter((1, 2, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=next(streams)))
    with pretended_gpu() as there:
        one, other, again = (splits.counters(there) for _ in range(3))
    splits._counters_of.cache_clear()
    assert again is one is not other
    assert one.shape == (splits.MOST_TILES,)


def test_bounds_of_splits():
    """Every cached position that is seen is in one split, and no split is empty but the first of an empty prefix."""

    class Kernel:  # what `split_bounds` computes, on numbers
        cdiv, maximum, minimum = staticmethod(triton.cdiv), max, min

    bounds = types.FunctionType(split_kv.split_bounds.fn.__code__, {"tl": Kernel})
    for first, cached, count in ((0, 0, 4), (0, 1, 4), (0, 64, 4), (17, 65, 4), (5, 1000, 8), (90, 80, 2), (0, 130, 1)):
        _, _, active = bounds(first, cached, 0, count, 16)
        assert 1 <= active <= count
        actual = [bounds(first, cached, split, count, 16)[:2] for split in range(active)]
        assert all(begin % 16 == 0 for begin, _ in actual)
        seen = [position for begin, end in actual for position in range(max(begin, first), end)]
        assert seen == list(range(first, cached))
        assert all(begin < end for begin, end in actual) or active == 1


def test_what_fills_a_batch_up_is_not_stored(monkeypatch):
    monkeypatch.setattr(kv_cache, "paged_attention", TritonAttention)
    made = Sequences(layout("int4", dim=32, page_size=16, dtype=torch.float16), (20,))
    caches, outputs = [], []
    for extra in (0, 2):
        caches.append(made.cache())
        made.step(caches[-1], [(0, 0, 15)])
        one = made.batch([(0, 15, 16)])
        batch = dataclasses.replace(
            one,
            positions=torch.cat([one.positions, torch.zeros(extra, dtype=torch.int64)]),
            slots=torch.cat([one.slots, torch.full((extra,), -1)]),
            query_starts=torch.tensor([0, 1] + extra * [1], dtype=torch.int32),
            page_table=torch.cat([one.page_table, torch.full((extra, 1), -1, dtype=torch.int32)]),
            residual_rows=torch.cat([one.residual_rows, torch.zeros(extra, dtype=torch.int64)]),
            query_lengths=(1,) * (1 + extra),
            context_lengths=(16,) * (1 + extra),
        )
        states = tuple(source[0][15:16].repeat(1 + extra, 1, 1) for source in (made.query, made.key, made.value))
        angles = torch.ones(1 + extra, 16), torch.zeros(1 + extra, 16)
        outputs.append(caches[-1].attention[0](states, batch, AttentionOptions(scale=0.2), angles)[0])
    assert torch.equal(*outputs)
    assert_same_memory(*caches)


def test_which_pages_are_read():
    for size, dim, expected in ((64, 128, True), (4, 64, False), (48, 64, False), (64, 512, False)):
        made = Sequences(layout(dim=dim, page_size=size, dtype=torch.float16), (3,)).cache()
        assert can(made._views[0]) == expected
    assert not can(Sequences(layout(dim=64, page_size=64), (3,)).cache()._views[0])  # float32
