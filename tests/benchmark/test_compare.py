"""Two models in turns: the order, the clock between rounds, and when a difference counts as one."""

from __future__ import annotations

import pytest

from quantkit.benchmark.compare import compare_results, compare_runs, join_rounds, split_rounds, turns
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun
from tests.benchmark.test_steps import timing, workload


def round_(start, gap, first=0.5, requests=2):
    """Requests one after another, each with three gaps."""
    return BenchmarkRun(
        workload=workload("closed-1", 1),
        requests=tuple(
            timing(i, 10, start + i * (first + 3 * gap), start + i * (first + 3 * gap) + first, gap, gap, gap)
            for i in range(requests)
        ),
    )


def rounds(*gaps, first=0.5):
    return join_rounds([round_(100 * i, gap, first) for i, gap in enumerate(gaps)])


def by_metric(ratios):
    return {ratio.metric: ratio for ratio in ratios}


def test_turns_alternate_who_begins():
    assert turns(1) == [0, 1]
    assert turns(4) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert turns(2, 3) == [0, 1, 2, 2, 1, 0]
    assert turns(3, 1) == [0, 0, 0]


def test_the_clock_stands_still_while_the_other_is_measured():
    run = rounds(0.1, 0.1, 0.1)
    assert run.rounds == 3
    assert run.duration_s == pytest.approx(6 * 0.8)  # not the 200 s between the rounds
    assert run.output_tokens_per_s == pytest.approx(24 / 4.8)
    assert run.ttft_s == pytest.approx([0.5] * 6)
    assert run.inter_token_s == pytest.approx([0.1] * 18)


def test_rounds_are_found_again():
    parts = split_rounds(rounds(0.1, 0.2, 0.3))
    assert [part.tpot_s for part in parts] == [pytest.approx([gap] * 2) for gap in (0.1, 0.2, 0.3)]


def test_a_difference_beyond_the_noise():
    ratios = by_metric(compare_runs(rounds(0.10, 0.11, 0.10), rounds(0.20, 0.21, 0.22)))
    itl = ratios["ITL"]
    assert itl.ratio == pytest.approx(0.10 / 0.21)
    assert (itl.low, itl.high) == pytest.approx((0.10 / 0.22, 0.11 / 0.21))
    assert itl.noise == pytest.approx(0.005 / 0.10)
    assert itl.verdict == ratios["TPOT"].verdict == ratios["tokens/s"].verdict == "faster"
    assert ratios["tokens/s"].ratio > 1
    assert ratios["TTFT"].verdict == "noise"  # all alike
    assert ratios["TTFT"].ratio == pytest.approx(1)
    back = by_metric(compare_runs(rounds(0.20, 0.21, 0.22), rounds(0.10, 0.11, 0.10)))
    assert {back[metric].verdict for metric in ("ITL", "TPOT", "tokens/s")} == {"slower"}


@pytest.mark.parametrize(
    "gaps",
    [
        ((0.10, 0.22, 0.10), (0.20, 0.20, 0.20)),  # one round says the opposite
        ((0.10, 0.17, 0.19), (0.20, 0.20, 0.20)),  # all rounds agree, but it strays further than it differs
    ],
)
def test_noise_is_called_noise(gaps):
    assert by_metric(compare_runs(rounds(*gaps[0]), rounds(*gaps[1])))["ITL"].verdict == "noise"


def test_drift_meets_both_alike():
    """A machine that slows down by half: in turns the ratio stays, one after the other it would not."""
    order, slow = turns(4), [1 + 0.5 * i / 7 for i in range(8)]
    gaps = {who: [(0.1, 0.2)[who] * slow[i] for i in range(8) if order[i] == who] for who in (0, 1)}
    itl = by_metric(compare_runs(rounds(*gaps[0]), rounds(*gaps[1])))["ITL"]
    assert itl.ratio == pytest.approx(0.5, rel=0.02)
    assert itl.verdict == "faster"


def test_only_runs_that_both_have_are_compared():
    run = rounds(0.1, 0.1)
    sweep = BenchmarkRun(workload=workload(SWEEP_NAME, 1), requests=run.requests, rounds=2)
    one, two = BenchmarkResult(model="a", runs=(run, sweep)), BenchmarkResult(model="b", runs=(run, sweep))
    assert {ratio.workload for ratio in compare_results(one, two)} == {"closed-1"}
    assert compare_results(one, BenchmarkResult(model="c")) == []
