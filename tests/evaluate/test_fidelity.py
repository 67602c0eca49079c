"""Distances of distributions: exact on numbers worked out by hand, zero for equal models, refusals in one line."""

from __future__ import annotations

import math

import pytest
import torch

import quantkit
from quantkit.errors import DataError, ModelError
from quantkit.evaluate import fidelity as module
from quantkit.evaluate.fidelity import (
    batches,
    distances,
    fidelity,
    fitting_texts,
    fixed_windows,
    join_distances,
    paired_batches,
    paired_logits,
    window_logits,
)
from quantkit.evaluate.loading import load_llm
from tests.helpers import TEXT, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def llm(folder):
    return load_llm(str(folder), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def rounded(folder, tmp_path_factory):
    """The same weights with four bits each."""
    path = tmp_path_factory.mktemp("out") / "int4"
    quantkit.quantize(folder, "rtn-int4", path, overrides=["weights.group_size=32"], device="cpu")
    return load_llm(str(path), dtype="float32", device="cpu", threads=1)


def test_kl_and_agreement_of_distributions_known_in_full():
    before = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log() + 7.0  # logits are free up to a constant
    after = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log() - 3.0
    result = distances(before, after)
    assert result.kl.tolist() == pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5), 0.0], abs=1e-6)
    assert result.agrees.tolist() == [False, True]
    assert result.mean == pytest.approx(0.125 * math.log(2), abs=1e-6)
    assert result.top1 == 0.5


def test_the_direction_is_that_of_the_original():
    sure, unsure = torch.tensor([[9.0, 0.0]]), torch.tensor([[0.5, 0.0]])
    one, other = distances(sure, unsure).mean, distances(unsure, sure).mean
    p = torch.softmax(sure, 1)
    assert one == pytest.approx(float((p * (p.log() - torch.softmax(unsure, 1).log())).sum()), rel=1e-5)
    assert other > 2 * one


def test_blocks_change_nothing(monkeypatch):
    a, b = torch.randn(10, 7), torch.randn(10, 7)
    whole = distances(a, b)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 3 * 4 * 7)
    parts = distances(a, b)
    assert torch.equal(whole.kl, parts.kl)
    assert torch.equal(whole.agrees, parts.agrees)


def test_windows_hold_every_token_once_behind_bos(llm):
    ids = llm.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    windows = fixed_windows(llm, TEXT, window=50, max_tokens=10**9)
    assert {window[0] for window in windows} == {llm.tokenizer.bos_token_id}
    assert [token for window in windows for token in window[1:]] == ids
    assert max(map(len, windows)) == 50
    few = fixed_windows(llm, TEXT, window=50, max_tokens=100)
    assert few == windows[:3]
    assert fixed_windows(llm, [5, 6, 7, 8, 9], window=3) == ((5, 6, 7), (8, 9))


def test_a_text_without_enough_tokens_is_refused(llm):
    with pytest.raises(DataError, match="has only 0 tokens"):
        fixed_windows(llm, "")


def test_equal_models_are_at_no_distance(llm):
    windows = fixed_windows(llm, TEXT, window=40, max_tokens=200)
    result = fidelity(llm, llm, windows, data="here", greedy_tokens=4)
    assert (result.mean_kl, result.max_kl, result.p99_kl, result.top1_agreement) == (0.0, 0.0, 0.0, 1.0)
    assert result.first_divergence == (None,) * len(windows)
    assert result.num_tokens == sum(map(len, windows))
    assert len(result.window_kl) == len(windows)
    assert (result.data, result.greedy_tokens) == ("here", 4)


def test_numbers_are_those_of_the_logits(llm, rounded):
    windows = fixed_windows(llm, TEXT, window=40, max_tokens=200)
    result = fidelity(rounded, llm, windows, greedy_tokens=0)
    expected = []
    for ids in windows:  # one at a time, in double precision
        p = window_logits(llm, (ids,))[0].double().log_softmax(-1)
        q = window_logits(rounded, (ids,))[0].double().log_softmax(-1)
        expected.append((p.exp() * (p - q)).sum(-1))
    assert result.mean_kl == pytest.approx(float(torch.cat(expected).mean()), rel=1e-3)
    assert result.window_kl == pytest.approx([float(part.mean()) for part in expected], rel=1e-2, abs=1e-7)
    assert 0 < result.mean_kl <= result.p99_kl <= result.max_kl
    assert result.first_divergence == ()


def test_pairs_are_the_last_rows_of_each_window(llm, rounded, monkeypatch):
    """The two models compute different numbers of tokens per step, and their windows differ in length."""
    theirs, ours, counts = ((5,) * 50, (7,) * 61), ((5,) * 44, (9,) * 9 + (7,) * 61), (40, 61)
    sizes = {id(llm): 13, id(rounded): 7}
    monkeypatch.setattr(module, "_chunk_size", lambda model, windows: sizes[id(model)])
    parts = [[], []]
    for index, reference, value in paired_logits(llm, rounded, theirs, ours, counts):
        assert len(reference) == len(value) <= 7
        parts[index].append((reference, value))
    for side, (model, windows) in enumerate(((llm, theirs), (rounded, ours))):
        for found, expected, count in zip(parts, window_logits(model, windows), counts, strict=True):
            assert torch.equal(torch.cat([pair[side] for pair in found]), expected[-count:])


def test_divergence_is_the_first_greedy_token_that_differs(llm, rounded):
    windows = fixed_windows(llm, TEXT, window=40, max_tokens=400)
    result = fidelity(rounded, llm, windows, greedy_tokens=24)
    texts = []
    for side in (rounded, llm):
        prompts = [list(ids[:32]) for ids in windows[:16]]
        params = module.SamplingParams(max_tokens=24, ignore_eos=True)
        texts.append([done.token_ids for done in side.generate(prompts, params)])
    for first, ours, theirs in zip(result.first_divergence, *texts, strict=True):
        agree = 24 if first is None else first
        assert ours[:agree] == theirs[:agree]
        assert first is None or ours[first] != theirs[first]


def test_windows_run_together_as_far_as_a_step_goes(llm):
    windows = ((1,) * 400,) * 5
    assert [len(group) for group in batches(llm, windows)] == [2, 2, 1]


def test_windows_are_decoded_together_where_the_cache_is_quantized(llm, folder, monkeypatch):
    """Each window has the distances that it has alone, and the weights are read once for all of them."""
    cached = load_llm(str(folder), dtype="float32", device="cpu", threads=1, kv_cache="int4")
    windows = fixed_windows(llm, TEXT, window=100, max_tokens=400)[:4]
    assert [len(batch) for batch in paired_batches(llm, cached, windows * 5, windows * 5)] == [16, 4]
    cache = cached.engine.runner.cache
    assert fitting_texts(cached, cache.page_size * cache.num_pages) == 1
    steps, step = [], cached.engine.step
    monkeypatch.setattr(cached.engine, "step", lambda: steps.append(1) or step())
    together = fidelity(cached, llm, windows, greedy_tokens=0)
    assert 100 <= len(steps) <= 102
    alone = [fidelity(cached, llm, (window,), greedy_tokens=0).mean_kl for window in windows]
    assert together.window_kl == pytest.approx(alone, rel=1e-4)
    assert min(alone) > 0


def test_joined_positions_are_in_order():
    parts = [distances(torch.randn(n, 3), torch.randn(n, 3)) for n in (2, 3)]
    assert torch.equal(join_distances(parts).kl, torch.cat([parts[0].kl, parts[1].kl]))


def test_another_vocabulary_is_refused(llm, tmp_path):
    other = load_llm(str(make_model(tmp_path / "other", vocab_size=300)), dtype="float32", device="cpu", threads=1)
    with pytest.raises(ModelError, match=r"vocabulary of 300 tokens, but the original .* has 260 tokens; give"):
        fidelity(other, llm, ((1, 2, 3),))
