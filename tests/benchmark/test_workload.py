"""Workloads are the same everywhere, fit, and have the lengths and arrivals that they say."""

from __future__ import annotations

import statistics

import pytest

from quantkit.benchmark.workload import check_capacity, closed_loop, length_sweep, make_load, poisson
from quantkit.errors import RequestError

SIZES = {"prompt_tokens": 40, "new_tokens": 20}


def test_the_same_arguments_make_the_same_requests():
    load = make_load(closed_loop(4, **SIZES, seed=3), 100)
    assert load == make_load(closed_loop(4, **SIZES, seed=3), 100)
    assert load.prompts != make_load(closed_loop(4, **SIZES, seed=4), 100).prompts
    # Written down: another machine, another version of Python, the same requests.
    assert load.prompts[0][:8] == (18, 17, 14, 6, 27, 22, 83, 11)


def test_a_turn_has_other_prompts_of_the_same_lengths():
    first, second = (make_load(closed_loop(2, **SIZES), 1000, spread=0.8, turn=turn) for turn in (0, 1))
    assert first.prompts != second.prompts
    assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts]
    assert first.new_tokens == second.new_tokens


def test_no_two_prompts_begin_alike():
    prompts = make_load(closed_loop(16, **SIZES), 1000).prompts
    assert len({prompt[:8] for prompt in prompts}) == len(prompts)


def test_tokens_to_avoid_are_avoided():
    load = make_load(closed_loop(8, **SIZES), 4, avoid=(1, 3))
    assert {token for prompt in load.prompts for token in prompt} == {0, 2}


def test_fixed_lengths_and_spread_ones():
    fixed = make_load(closed_loop(50, **SIZES), 100)
    assert {len(p) for p in fixed.prompts} == {40}
    assert set(fixed.new_tokens) == {20}
    spread = make_load(closed_loop(50, **SIZES), 100, spread=0.5)
    lengths = [len(prompt) for prompt in spread.prompts]
    assert 20 <= min(lengths) < 24
    assert 36 < max(lengths) <= 40
    assert 10 <= min(spread.new_tokens) < max(spread.new_tokens) <= 20


def test_requests_by_default():
    assert closed_loop(1, **SIZES).num_requests == 4
    assert closed_loop(8, **SIZES).num_requests == 16
    assert closed_loop(8, **SIZES, num_requests=3).num_requests == 3
    load = make_load(closed_loop(8, **SIZES, num_requests=3), 100)
    assert len(load.prompts) == len(load.new_tokens) == 3 + load.workload.num_warmup


def test_the_sweep_goes_up_and_down():
    load = make_load(length_sweep(prompt_tokens=60, new_tokens=100), 100)
    lengths = [len(prompt) for prompt in load.prompts][load.workload.num_warmup :]
    assert lengths == [10, 20, 30, 40, 50, 60, 60, 50, 40, 30, 20, 10]
    assert set(load.new_tokens) == {9}


def test_arrivals_are_poisson():
    load = make_load(poisson(5.0, **SIZES, num_requests=4000), 100)
    gaps = [after - before for before, after in zip(load.due_s, load.due_s[1:], strict=False)]
    assert load.due_s[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # as large as the mean: exponential
    assert make_load(closed_loop(2, **SIZES), 100).due_s == ()


@pytest.mark.parametrize(
    ("prompt", "new", "advice"), [(90, 20, "--prompt-tokens can be 80 at most"), (90, 100, "--new-tokens can be 99")]
)
def test_what_does_not_fit_is_refused_with_what_does(prompt, new, advice):
    check_capacity([closed_loop(1, prompt_tokens=80, new_tokens=20)], 100, "the context of demo")
    with pytest.raises(RequestError, match=f"the context of demo is 100 tokens; {advice}"):
        check_capacity([closed_loop(1, prompt_tokens=prompt, new_tokens=new)], 100, "the context of demo")
