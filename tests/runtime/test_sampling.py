"""Sampling against plain definitions, one row at a time; draws against their probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.kernels.reference import sampling
from quantkit.runtime.sampling import apply_bias, apply_penalties, draw_of, log_probabilities, sample
from quantkit.runtime.sequence import Sequence, TokenHistory
from quantkit.runtime.types import SamplingParams


def sequence(params, ids=(1, 2, 3), num_prompt=3, seed=0, drafts=()):
    history = TokenHistory(list(ids[:num_prompt])) if params.has_penalties else None
    for token in ids[num_prompt:]:
        if history:
            history.add(token)
    return Sequence(
        id=0, ids=list(ids), num_prompt=num_prompt, params=params, limit=99, seed=seed, stop_ids=frozenset(),
        arrived=0.0, history=history, drafts=list(drafts),
    )  # fmt: skip


def candidates(logits, rows):
    return sampling.candidates(logits, [draw_of(row) for row in rows])


def expected_kept(logits, params):
    """Indices kept by the definitions, in plain Python."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: params.top_k or len(scaled)]
    total = sum(math.exp(scaled[i] - scaled[order[0]]) for i in order)
    kept, before = [], 0.0
    for i in order:
        if before < params.top_p:
            kept.append(i)
        before += math.exp(scaled[i] - scaled[order[0]]) / total
    return {i for i in kept if math.exp(scaled[i] - scaled[order[0]]) >= params.min_p}


def test_biases_are_added_to_their_rows():
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    biases = [{3: 2.5, 7: -100}, None, {0: 1}]
    rows = [(sequence(SamplingParams(logit_bias=bias)), 0) for bias in biases]
    expected = logits.clone()
    for row, bias in enumerate(biases):
        for token, value in (bias or {}).items():
            expected[row, token] += value
    kept = logits.clone()
    assert torch.equal(apply_bias(logits, rows), expected)
    assert torch.equal(logits, kept)
    assert apply_bias(logits, rows[1:2]) is logits


def test_a_bias_comes_before_penalties_and_cannot_lift_a_constraint():
    class OnlyFive:
        def allowed(self, drafts):
            return torch.arange(20).eq(5).numpy()

    logits = torch.zeros(2, 20)
    params = SamplingParams(logit_bias={1: 10, 2: 6}, repetition_penalty=2.0)
    rows = [(sequence(params, ids=(1, 3, 4)), 0), (sequence(params), 0)]
    rows[1][0].constraint = OnlyFive()
    assert sample(logits, rows) == [2, 5]


@pytest.mark.parametrize("bias", [[1], {"1": 2.0}, {1: 101}, {1: float("nan")}, {True: 1.0}])
def test_a_bias_that_is_none_is_refused(bias):
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.3, top_p=0.1),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=2.0, top_k=1000, top_p=0.99999),
]


@pytest.mark.parametrize("size", [20, 1000])
def test_filters_keep_what_the_definitions_say_alone_and_together(size):
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(FILTERS), size)
    rows = [(sequence(params), 0) for params in FILTERS]
    together, ids = candidates(logits, rows)
    for row, params in enumerate(FILTERS):
        want = expected_kept(logits[row].tolist(), params)
        kept = together[row].isfinite()
        assert set(ids[row][kept].tolist()) == want
        values, alone = candidates(logits[row : row + 1], rows[row : row + 1])
        kept = values[0].isfinite()
        assert set(kept.nonzero().flatten().tolist() if alone is None else alone[0][kept].tolist()) == want


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1, top_p=0.3)])
def test_ties_with_the_last_kept_are_kept(params):
    logits = torch.zeros(1, 600)
    logits[0, 300:302] = 1 if params.top_k else 0
    values, _ = candidates(logits, [(sequence(params), 0)])
    assert values.isfinite().sum() == 600


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert sample(logits, [(sequence(SamplingParams()), 0)] * 2) == [1, 0]


def test_greedy_and_sampled_rows_in_one_batch():
    logits = torch.tensor([[0.0, 5.0, 1.0]]).repeat(3, 1)
    greedy, tiny = sequence(SamplingParams()), sequence(SamplingParams(temperature=0.01))
    hot = [sequence(SamplingParams(temperature=100.0), seed=seed) for seed in range(40)]
    assert sample(logits, [(greedy, 0), (tiny, 0), (greedy, 0)]) == [1, 1, 1]
    assert {sample(logits[:1], [(item, 0)])[0] for item in hot} == {0, 1, 2}


def chi_square(counts, probabilities):
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 4}], ids=str)
def test_draws_follow_the_probabilities(params):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    params = SamplingParams(**params)
    rows = [(sequence(params, seed=seed, ids=range(at)), 0) for seed in range(200) for at in range(1, 41)]
    drawn = torch.tensor(sample(logits.repeat(len(rows), 1), rows))
    kept = sorted(expected_kept(logits.tolist(), params))
    counts = [int((drawn == token).sum()) for token in kept]
    assert sum(counts) == len(rows)
    probabilities = (logits[kept] / params.temperature).softmax(0).tolist()
    # 99.9 % points of chi-square with 5 and 3 degrees of freedom.
    assert chi_square(counts, probabilities) < {6: 20.5, 4: 16.3}[len(kept)]


def test_seeds_and_positions_draw_independently():
    logits = torch.zeros(1, 50)
    params = SamplingParams(temperature=1.0)
    draws = [[sample(logits, [(sequence(params, seed=s, ids=range(at)), 0)])[0] for at in range(1, 40)] for s in (1, 2)]
    assert draws[0] != draws[1]
    assert sum(a == b for a, b in zip(*draws, strict=True)) < 6
    assert len(set(draws[0])) > 15


def test_the_position_counts_drafts():
    logits = torch.zeros(1, 500)
    params = SamplingParams(temperature=1.0)
    with_drafts = sample(logits, [(sequence(params, ids=(1, 2), drafts=(3, 4)), 2)])
    assert with_drafts == sample(logits, [(sequence(params, ids=(1, 2, 3, 4)), 0)])


PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)


def penalized(logits, prompt, output, params):
    """The definitions, token by token."""
    actual = list(logits)
    for token in range(len(actual)):
        if token in prompt or token in output:
            positive = actual[token] > 0
            actual[token] = (
                actual[token] / params.repetition_penalty if positive else actual[token] * params.repetition_penalty
            )
        if token in output:
            actual[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return actual


def test_penalties_are_the_definitions_with_drafts_counted():
    torch.manual_seed(0)
    logits = torch.randn(4, 12)
    plain = sequence(SamplingParams())
    one = sequence(PENALTIES, ids=(1, 2, 3, 3, 4, 4), num_prompt=3, drafts=(4, 9, 9))
    two = sequence(SamplingParams(frequency_penalty=1.0), ids=(5, 6, 6), num_prompt=1)
    actual = apply_penalties(logits, [(one, 0), (plain, 0), (one, 3), (two, 0)])
    expected = [
        penalized(logits[0].tolist(), [1, 2, 3], [3, 4, 4], PENALTIES),
        logits[1].tolist(),
        penalized(logits[2].tolist(), [1, 2, 3], [3, 4, 4, 4, 9, 9], PENALTIES),
        penalized(logits[3].tolist(), [5], [6, 6], two.params),
    ]
    torch.testing.assert_close(actual, torch.tensor(expected))
    again = apply_penalties(logits, [(one, 0)])  # looking ahead has left no trace
    torch.testing.assert_close(again[0], torch.tensor(expected[0]))


def test_a_long_history_grows():
    history = TokenHistory(list(range(300)))
    for token in range(250, 400):
        history.add(token)
    tokens, counts = history.seen([])
    assert tokens.tolist() == list(range(400))
    assert counts.tolist() == [0.0] * 250 + [1.0] * 150


def test_logprobs_are_the_models_own():
    torch.manual_seed(0)
    logits = torch.randn(3, 10)
    wants = sequence(SamplingParams(logprobs=2, temperature=2.0))
    rows = [(wants, 0), (sequence(SamplingParams()), 0), (sequence(SamplingParams(logprobs=0)), 0)]
    first, second, third = log_probabilities(logits, rows, [4, 5, 6])
    table = logits.log_softmax(-1)
    assert second is None
    assert first.logprob == pytest.approx(table[0, 4].item())
    assert [token for token, _ in first.top] == table[0].topk(2).indices.tolist()
    assert (third.token_id, third.top) == (6, ())


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 5e-324])
def test_almost_no_temperature_is_greedy(temperature):
    logits = torch.tensor([[3.0, 7.0, -2.0, 6.9]])
    params = SamplingParams(temperature=temperature)
    assert sample(logits, [(sequence(params), 0)]) == [1]


def test_a_history_grows_with_the_output():
    """The 65th distinct token is where its arrays are replaced by larger ones."""
    history = TokenHistory(list(range(60)))
    for token in (*range(60, 70), 69):
        history.add(token)
    tokens, counts = history.seen([])
    assert tokens.tolist() == list(range(70))
    assert counts.tolist() == [0.0] * 60 + [1.0] * 9 + [2.0]
