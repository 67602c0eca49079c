"""The KV cache as engine and planner see it: exact bytes, tokens taken back, shared pages, rows reused, poison."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import ResourceError
from quantkit.kernels.layouts import page_bytes, residual_bytes
from quantkit.models.kv_sizes import MAX_ROLLBACK
from quantkit.runtime.cache.kv_cache import KVCache
from tests.kernels.paged import IMPLEMENTATIONS, KV_TYPES, Sequences, layout, use


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request, monkeypatch):
    """Every test runs with each of them."""
    use(request.param, monkeypatch)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_bytes_are_what_the_planner_says(kind):
    layouts = [layout(kind), layout(is_windowed=True), layout(kind, dim=80, dtype=torch.bfloat16)]
    cache = KVCache(layouts, 7, 3)
    assert cache.num_bytes == 7 * page_bytes(layouts)
    assert cache.residual_bytes == residual_bytes(layouts, 3)
    assert (cache.num_pages, cache.page_size) == (7, 4)


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("start", range(5, 13))
def test_tokens_taken_back_leave_no_trace(kind, start):
    """Five tokens that cross a page border, three of them rejected and others in their place: as if never written."""
    drafted, fresh = Sequences(layout(kind), (20,)), Sequences(layout(kind), (20,))
    other = Sequences(layout(kind), (20,), seed=1)
    cache, plain = drafted.cache(), fresh.cache()
    for at in range(start):
        drafted.step(cache, [(0, at, at + 1)])
        fresh.step(plain, [(0, at, at + 1)])
    for name in ("query", "key", "value"):  # rejected tokens differ from those that come in the end
        getattr(drafted, name)[0][start + 2 : start + 5] = getattr(other, name)[0][start + 2 : start + 5]
    drafted.step(cache, [(0, start, start + 5)])
    for name in ("query", "key", "value"):
        getattr(drafted, name)[0][:] = getattr(fresh, name)[0]
    fresh.step(plain, [(0, start, start + 2)])
    for at in range(start + 2, 20):
        assert torch.equal(drafted.step(cache, [(0, at, at + 1)])[0], fresh.step(plain, [(0, at, at + 1)])[0])
    accepted = drafted.pages[0][: 20 // 4]
    for pool, expected in zip(cache._pools, plain._pools, strict=True):
        assert torch.equal(pool[accepted], expected[accepted])


def test_as_many_tokens_as_promised_can_be_taken_back():
    sequences = Sequences(layout("int4"), (40,))
    cache = sequences.cache()
    sequences.step(cache, [(0, 0, 7)])
    sequences.step(cache, [(0, 7, 8 + MAX_ROLLBACK)])
    out = sequences.step(cache, [(0, 8, 12)])[0]  # all but the token at position 7 were rejected
    assert (out - sequences.expected(0, 8, 12)).abs().max() < 5e-6
    sequences.step(cache, [(0, 11, 11 + MAX_ROLLBACK)])
    out = sequences.step(cache, [(0, 11, 12)])[0]  # all of them; eleven remain, three of them in an open page
    assert (out - sequences.expected(0, 11, 12)).abs().max() < 5e-6


@pytest.mark.parametrize("kind", KV_TYPES)
def test_shared_pages_serve_a_second_sequence(kind):
    """It starts at a page border in a row whose residual window holds garbage, and never writes what it shares."""
    sequences = Sequences(layout(kind), (15, 15))
    cache = sequences.cache()
    sequences.step(cache, [(0, 0, 15)])
    for source in (sequences.query, sequences.key, sequences.value):
        source[1][:8] = source[0][:8]
    sequences.pages[1] = torch.cat([sequences.pages[0][:2], sequences.pages[1][2:]])
    before = cache._pools[0][sequences.pages[0][:2]].clone()
    for span in [(1, 8, 9), (1, 9, 14), (1, 14, 15)]:
        out = sequences.step(cache, [span])[0]
        assert (out - sequences.expected(*span)).abs().max() < 5e-6
    assert torch.equal(cache._pools[0][sequences.pages[0][:2]], before)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_recomputing_in_one_chunk_gives_the_same_pages(kind):
    """After a preemption all known tokens come as one chunk: pages hold the same bits as when they came one by one."""
    slow, quick = Sequences(layout(kind), (14,)), Sequences(layout(kind), (14,))
    first, second = slow.cache(), quick.cache()
    for at in range(13):
        slow.step(first, [(0, at, at + 1)])
    quick.step(second, [(0, 0, 13)])
    assert torch.equal(first._pools[0], second._pools[0])
    assert torch.equal(slow.step(first, [(0, 13, 14)])[0], quick.step(second, [(0, 13, 14)])[0])


def test_layers_do_not_share_memory():
    shape = layout()
    sequences = Sequences(shape, (3,))
    cache = KVCache([shape, shape], sequences.num_pages, 2)
    for pool in cache._pools:
        pool.fill_(255)
    sequences.step(cache, [(0, 0, 3)])
    assert cache._pools[1].min() == 255
    assert cache._pools[0].min() < 255


def test_a_cache_that_does_not_fit_is_refused_in_one_line():
    with pytest.raises(ResourceError, match=r"a KV cache of 1125899906842624 pages needs \d+ MiB on cpu") as error:
        KVCache([layout()], 2**50, 1)
    assert "\n" not in str(error.value)
