"""Recomputing gives the same text, from prefills of everything before each token."""

from __future__ import annotations

import pytest

from quantkit.benchmark.no_cache import CacheComparison, compare_cache, generate_by_recomputing
from quantkit.results import RequestTiming
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams


@pytest.fixture(scope="module")
def demo():
    # In float32: in 16 bits a prompt and a token may round differently, and a tie then parts the texts.
    return LLM(dtype="float32", max_sequences=2, prefix_cache=False, threads=1)


@pytest.fixture
def computed(demo, monkeypatch):
    """Tokens of every forward pass; decode steps run layer by layer, since one native call is not seen here."""
    compute, counts = demo.model.compute, []
    monkeypatch.setattr(
        demo.model, "compute", lambda batch, cache: (counts.append(len(batch.token_ids)), compute(batch, cache))[1]
    )
    with demo.engine.runner.layer_by_layer():
        yield counts


def test_every_token_is_a_prefill_of_all_before_it(demo, computed):
    ids, timing = generate_by_recomputing(demo, [5, 6, 7], 6)
    assert computed == [3, 4, 5, 6, 7, 8]
    assert timing.num_new_tokens == len(ids) == 6
    computed.clear()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert demo.generate([5, 6, 7], params)[0].token_ids == tuple(ids)
    assert computed == [3, 1, 1, 1, 1, 1]  # with the cache


def test_a_prefix_cache_would_be_no_comparison(computed):
    """What the fixture's engine must not have: with it, pages that are known are not computed again."""
    cached = LLM(max_sequences=2, prefix_cache=True, threads=1, page_size=4)
    ids, _ = generate_by_recomputing(cached, list(range(10, 30)), 3)
    assert cached.stats()["prefix_hit_tokens"] > 0
    assert len(ids) == 3


def test_the_comparison(demo):
    reported = []
    comparison = compare_cache(demo, list(range(10, 30)), 120, reported.append)
    assert comparison.num_same == 120
    assert reported[-120:] == list(range(1, 121))
    marks = comparison.marks()
    assert [mark.new_tokens for mark in marks] == [1, 10, 30, 100, 120]
    assert marks[-1].recomputed_s == comparison.recomputed.token_s[-1] - comparison.recomputed.arrived_s
    assert marks[-1].ratio > 1.5  # 80 times the tokens; measured far above


def test_marks_by_hand():
    cached = RequestTiming(request_id=0, prompt_tokens=3, arrived_s=1.0, token_s=(1.5, 1.6, 1.7))
    slow = RequestTiming(request_id=0, prompt_tokens=3, arrived_s=10.0, token_s=(10.5, 11.0, 11.4))
    marks = CacheComparison(cached=cached, recomputed=slow, num_same=3).marks()
    assert [(mark.new_tokens, round(mark.ratio, 6)) for mark in marks] == [(1, 1.0), (3, 2.0)]
