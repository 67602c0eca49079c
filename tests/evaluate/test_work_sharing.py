"""Batches of items: cut by the items alone, and who computes them in which order changes no bit."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from quantkit.demo import DEMO_MODEL
from quantkit.evaluate import work_sharing
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.work_sharing import Meter, cut, generate_in_turns, score_in_turns
from quantkit.machine.system import resident_bytes
from quantkit.runtime.types import SamplingParams, ScoredText


@pytest.mark.parametrize(
    ("weights", "least", "most", "sizes"),
    [
        ([], 1, 8, []),
        ([5], 1, 8, [1]),
        ([1] * 3, 1, 8, [1, 1, 1]),
        ([1] * 40, 8, 32, [10] * 4),
        ([1] * 20, 8, 32, [10] * 2),
        ([1] * 130, 8, 32, [17, 16, 16, 16, 17, 16, 16, 16]),
        ([9, 1, 1, 1], 1, 64, [1, 3]),
        ([4, 0, 0, 4, 4, 4], 1, 64, [3, 1, 1, 1]),
    ],
)
def test_batches_are_about_as_heavy_and_leave_nothing_out(weights, least, most, sizes):
    batches = cut(weights, least, most)
    assert [len(batch) for batch in batches] == sizes
    assert [at for batch in batches for at in batch] == list(range(len(weights)))


@pytest.fixture
def llm(tiny_llama):
    return load_llm(str(tiny_llama), dtype="float32", threads=1, device="cpu")


@pytest.fixture
def small(monkeypatch):
    """Batches of a few tokens, as longer texts would have."""
    monkeypatch.setattr(work_sharing, "_TOKENS", (16, 64))


def backwards(items, compute, costs=()):
    """As another rank would: other batches before each."""
    return [compute(item) for item in reversed(items)][::-1]


TEXTS = [ScoredText(ids=(*range(5, 5 + 20 + n % 7), 3 + n, 4 + n % 3), num_scored=2 + n % 2) for n in range(60)]


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_scores_do_not_depend_on_what_was_computed_before(llm, small, monkeypatch, chunk_size):
    score = partial(score_in_turns, llm, TEXTS, chunk_size=chunk_size)
    first = score()
    monkeypatch.setattr(work_sharing, "share_out", backwards)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(first, score(), strict=True))
    alone = llm.score_tokens(TEXTS, chunk_size=chunk_size)
    for one, other in zip(first, alone, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        torch.testing.assert_close(one.logprobs, other.logprobs)


def test_texts_do_not_depend_on_what_was_computed_before(llm, monkeypatch):
    prompts = [list(text.ids) for text in TEXTS]
    params = [SamplingParams(max_tokens=6, temperature=float(n % 2)) for n in range(len(prompts))]
    first = generate_in_turns(llm, prompts, params)
    assert len({done.token_ids for done in first[1::2]}) > 8  # drawn
    monkeypatch.setattr(work_sharing, "share_out", backwards)
    again = generate_in_turns(llm, prompts, params)
    assert [done.token_ids for done in again] == [done.token_ids for done in first]


@pytest.mark.skipif(resident_bytes() is None, reason="reads what Linux says of a process")
def test_memory_does_not_grow_with_the_number_of_windows():
    """What is kept of each lies between the freed logits of others."""
    llm = load_llm(str(DEMO_MODEL), dtype="float32", threads=1, device="cpu")
    texts = [ScoredText(ids=tuple(range(start % 900, start % 900 + 32)), num_scored=31) for start in range(6000)]
    score_in_turns(llm, texts[:200])
    before = resident_bytes()
    scores = score_in_turns(llm, texts)
    assert len(scores) == len(texts)
    assert resident_bytes() - before < 64 << 20


def test_progress_has_a_total_and_the_time_left_and_a_line_per_5_percent_at_most(monkeypatch):
    clock = itertools.count(step=3.0)
    monkeypatch.setattr(
        "quantkit.evaluate.work_sharing.time", SimpleNamespace(monotonic=clock.__next__)
    )  # for it alone
    said: list[str] = []
    meter = Meter(said.append, "requests", [1] * 500 + [3] * 500)
    for done in range(1, 1001):
        meter.reach(done)
    assert len(said) == 20
    assert said[4] == "500 of 1,000 requests, about 1 h 15 min left"  # a quarter of the work in 1,500 s
    assert said[-1] == "1,000 of 1,000 requests, 50 min 0 s"


def test_short_jobs_say_nothing(llm):
    said: list[str] = []
    score_in_turns(llm, TEXTS[:4], say=said.append)
    assert said == []


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_scoring_says_how_many_of_how_many_texts_are_done(llm, monkeypatch, chunk_size):
    monkeypatch.setattr("quantkit.evaluate.work_sharing._PAUSE_S", 0.0)
    said: list[str] = []
    score_in_turns(llm, TEXTS, chunk_size=chunk_size, say=said.append, items="windows")
    assert 2 <= len(said) <= 20
    assert all(f" of {len(TEXTS):,} windows, " in line for line in said)
    assert said[-1].startswith(f"{len(TEXTS):,} of ")


def test_generation_says_how_many_answers_are_done(llm, monkeypatch):
    monkeypatch.setattr("quantkit.evaluate.work_sharing._PAUSE_S", 0.0)
    said: list[str] = []
    generate_in_turns(llm, [[1, 2, 3]] * 40, [SamplingParams(max_tokens=2)] * 40, say=said.append)
    assert len(said) > 1
    assert said[-1].startswith("40 of 40 answers, ")
