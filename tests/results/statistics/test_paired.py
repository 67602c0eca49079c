"""Intervals that cover what they say, tests that reject as often as they may, on synthetic pairs with known truth."""

from __future__ import annotations

import math
import random
import statistics
from functools import cache

import pytest

from quantkit.results.statistics.paired import (
    Counts,
    binomial_pmf,
    compare_pairs,
    compare_strata,
    mcnemar,
)
from tests.helpers import one_of_each

DRAWS = 2000


def pairs_of(counts: Counts) -> tuple[list[float], list[float]]:
    before = [1.0] * (counts.both + counts.lost) + [0.0] * (counts.won + counts.neither)
    after = [1.0] * counts.both + [0.0] * counts.lost + [1.0] * counts.won + [0.0] * counts.neither
    return before, after


@cache
def interval_of(lost: int, won: int, total: int) -> tuple[float, float]:
    result = compare_strata([Counts(both=total - lost - won, lost=lost, won=won, neither=0)])
    return result.low, result.high


@cache
def ratio_interval_of(both: int, lost: int, won: int, neither: int) -> tuple[float, float]:
    result = compare_strata([Counts(both=both, lost=lost, won=won, neither=neither)])
    return result.ratio_low, result.ratio_high


def draw(rng: random.Random, total: int, lost: float, won: float, right: float) -> Counts:
    """`right` is the original's accuracy; `lost` and `won` are shares of all items."""
    limits = (right - lost, right, right + won)
    seen = [0, 0, 0, 0]
    for _ in range(total):
        x = rng.random()
        seen[sum(x >= limit for limit in limits)] += 1
    return Counts(both=seen[0], lost=seen[1], won=seen[2], neither=seen[3])


def trinomial(total: int, lost: float, won: float):
    """Every (lost, won) that can happen, with its probability (what is below 1e-9 left out)."""
    rest = 1 - lost - won
    reach = int(total * (lost + won) + 9 * math.sqrt(total * (lost + won)) + 9)
    for b in range(min(total, reach) + 1):
        for c in range(min(total, reach) + 1 - b):
            ways = math.lgamma(total + 1) - math.lgamma(b + 1) - math.lgamma(c + 1) - math.lgamma(total - b - c + 1)
            log = ways + b * math.log(lost) + c * math.log(won) + (total - b - c) * math.log(rest)
            if log > -20:
                yield b, c, math.exp(log)


# Total, lost, won: at least three differing items expected. Coverage is exact, so it has no error of its own.
CELLS = [
    (50, 0.06, 0.03),
    (50, 0.12, 0.10),
    (100, 0.03, 0.01),
    (100, 0.10, 0.05),
    (200, 0.01, 0.01),
    (200, 0.03, 0.02),
    (1000, 0.005, 0.002),
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in [(1000, 0.03, 0.02), (5000, 0.005, 0.002), (5000, 0.01, 0.01)]
    ),
]


@pytest.mark.parametrize(("total", "lost", "won"), CELLS)
def test_the_interval_of_a_difference_covers_95_per_cent_exactly_computed(total, lost, won):
    truth = won - lost
    covered = 0.0
    for b, c, chance in trinomial(total, lost, won):
        low, high = interval_of(b, c, total)
        covered += chance * (low <= truth <= high)
    # Seldom differing items move the exact coverage by steps; with 4.5 expected it is 97.1 %.
    assert 0.93 <= covered <= (0.97 if total * (lost + won) > 5 else 0.975), covered


@pytest.mark.parametrize(("total", "lost", "won"), [(50, 0.005, 0.005), (50, 0.02, 0.01), (200, 0.005, 0.002)])
def test_with_hardly_any_differing_items_it_covers_more_never_less(total, lost, won):
    covered = sum(
        chance
        for b, c, chance in trinomial(total, lost, won)
        if interval_of(b, c, total)[0] <= won - lost <= interval_of(b, c, total)[1]
    )
    assert covered >= 0.95


@pytest.mark.parametrize(("right", "total"), one_of_each([0.5, 0.7, 0.9, 0.99], [200, 1000]))
def test_both_intervals_cover_95_per_cent_in_2000_draws(right, total):
    lost, won = 0.02, 0.01
    won = min(won, (1 - right) * 0.8)
    rng = random.Random(f"{total} {right}")
    difference = ratio = 0
    for _ in range(DRAWS if total == 200 else DRAWS // 4):
        c = draw(rng, total, lost, won, right)
        low, high = interval_of(c.lost, c.won, total)
        difference += low <= won - lost <= high
        low, high = ratio_interval_of(c.both, c.lost, c.won, c.neither)
        ratio += low <= (right - lost + won) / right <= high
    draws = DRAWS if total == 200 else DRAWS // 4
    margin = 0.02 if draws == DRAWS else 0.03  # three standard errors of 500 draws are 2.9 points
    assert abs(difference / draws - 0.95) <= margin
    assert abs(ratio / draws - 0.95) <= margin


def test_an_interval_that_is_too_narrow_would_be_caught():
    """The plain Wald interval fails where few items differ, and the same check sees it."""
    covered = 0.0
    for b, c, chance in trinomial(50, 0.03, 0.01):
        difference, reach = (c - b) / 50, 1.96 * math.sqrt(max(0, b + c - (c - b) ** 2 / 50)) / 50
        covered += chance * (difference - reach <= -0.02 <= difference + reach)
    assert covered < 0.93


@pytest.mark.parametrize(("total", "share"), [(50, 0.02), (200, 0.01), (200, 0.05), (1000, 0.02), (5000, 0.01)])
def test_noise_is_called_a_difference_in_at_most_6_per_cent(total, share):
    """McNemar's mid-p test, both directions equally likely, over every number of differing items."""
    rejected = 0.0
    for differing in range(1, int(2 * total * share + 9 * math.sqrt(2 * total * share) + 9)):
        inside = sum(
            binomial_pmf(lost, differing) for lost in range(differing + 1) if mcnemar(lost, differing - lost) < 0.05
        )
        rejected += binomial_pmf(differing, total, 2 * share) * inside
    assert rejected <= 0.06


def test_a_loss_of_one_point_on_5000_items_is_detected_and_noise_is_not():
    """With 4 % of items differing, as between 16 and 4 bits: found in over 90 % of draws."""
    rng = random.Random(1)

    def share_found(lost: float, won: float) -> float:
        rejected = 0
        for _ in range(DRAWS):
            differing = sum(rng.random() < lost + won for _ in range(500)) * 10  # in tens, to be quick
            worse = round(rng.gauss(differing * lost / (lost + won), math.sqrt(differing * lost * won) / (lost + won)))
            rejected += mcnemar(min(max(worse, 0), differing), differing - min(max(worse, 0), differing)) < 0.05
        return rejected / DRAWS

    assert share_found(0.025, 0.015) > 0.9
    assert share_found(0.02, 0.02) <= 0.06


def test_mcnemar_on_small_counts_by_hand():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == pytest.approx(1.0)
    assert mcnemar(0, 5) == pytest.approx(2 * 0.5**5 - 0.5**5)
    assert mcnemar(3, 9) == mcnemar(9, 3)


def likeliest(counts: Counts, lost_of, steps: int = 20000) -> tuple[float, float]:
    """Shares (lost, won) of the largest likelihood on a line, found by trying."""
    best, shares = -math.inf, (0.0, 0.0)
    for i in range(1, steps):
        won = i / steps
        for lost, both, neither in lost_of(won):
            if min(lost, both, neither) <= 0:
                continue
            value = sum(
                n * math.log(p)
                for n, p in ((counts.both, both), (counts.lost, lost), (counts.won, won), (counts.neither, neither))
            )
            if value > best:
                best, shares = value, (lost, won)
    return shares


@pytest.mark.parametrize("difference", [-0.08, 0.0, 0.05])
def test_variances_are_those_of_the_likeliest_shares_under_the_hypothesis(difference):
    counts = Counts(both=60, lost=9, won=4, neither=27)

    def candidates(won):
        lost = won - difference
        rest = 1 - won - lost
        yield lost, rest * 60 / 87, rest * 27 / 87  # both and neither share the rest as seen

    lost, won = likeliest(counts, candidates)
    expected = (lost + won - difference**2) / 100
    assert counts.difference_variance(difference) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("ratio", [0.85, 1.0, 1.1])
def test_the_ratio_s_variance_is_that_of_the_likeliest_shares(ratio):
    counts = Counts(both=60, lost=9, won=4, neither=27)

    def candidates(won):
        # won + both = ratio (lost + both), and everything sums to 1: one more share is free.
        for i in range(1, 100):
            both = 0.5 + i / 500
            lost = (won + both) / ratio - both
            yield lost, both, 1 - won - lost - both

    lost, won = likeliest(counts, candidates, steps=1000)
    assert counts.ratio_variance(ratio) == pytest.approx(ratio * (lost + won) / 100, rel=0.03)


def test_scores_that_are_not_right_or_wrong_get_student_s_interval():
    rng = random.Random(2)
    covered = ratio = 0
    for _ in range(DRAWS):
        before = [rng.uniform(0.2, 1.0) for _ in range(50)]
        after = [b + rng.gauss(-0.03, 0.1) for b in before]
        result = compare_pairs([(before, after)])
        covered += result.low <= -0.03 <= result.high
        ratio += result.ratio_low <= 0.57 / 0.6 <= result.ratio_high
    assert abs(covered / DRAWS - 0.95) <= 0.02
    assert abs(ratio / DRAWS - 0.95) <= 0.02


def test_the_mean_over_tasks_of_different_size_and_loss_is_covered():
    rng = random.Random(3)
    tasks = ((100, 0.06, 0.02, 0.6), (300, 0.03, 0.03, 0.8), (60, 0.05, 0.08, 0.5))
    truth = sum(won - lost for _, lost, won, _ in tasks) / 3
    ratio_truth = sum(right + won - lost for _, lost, won, right in tasks) / sum(t[3] for t in tasks)
    covered = ratio = 0
    for _ in range(600):
        result = compare_pairs([pairs_of(draw(rng, *task)) for task in tasks])
        covered += result.low <= truth <= result.high
        ratio += result.ratio_low <= ratio_truth <= result.ratio_high
    assert abs(covered / 600 - 0.95) <= 0.027  # three standard errors of 600 draws
    assert abs(ratio / 600 - 0.95) <= 0.027


def test_the_smallest_scored_task_decides_how_wide_the_interval_is():
    """Student's t of the 4 pairs, 3.18 standard errors at 3 degrees of freedom, whatever the 400 others know."""
    rng = random.Random(5)
    small, large = ([rng.gauss(0, 1) for _ in range(count)] for count in (4, 400))
    result = compare_pairs([([0.0] * len(after), after) for after in (small, large)])
    error = math.sqrt(sum(statistics.variance(after) / len(after) for after in (small, large))) / 2
    assert (result.high - result.low) / 2 == pytest.approx(3.1824 * error, rel=1e-3)


def test_equal_answers_give_no_difference_and_an_interval_that_still_admits_one():
    result = compare_pairs([([1.0, 0.0] * 50, [1.0, 0.0] * 50)])
    assert (result.difference, result.p_value, result.ratio) == (0.0, 1.0, 1.0)
    assert -0.05 < result.low < 0 < result.high < 0.05


def test_a_baseline_of_zero_has_no_ratio():
    result = compare_pairs([([0.0] * 20, [1.0] * 3 + [0.0] * 17)])
    assert (result.ratio, result.ratio_low, result.ratio_high) == (None, None, None)
    assert result.low < 0 < result.high  # three won of twenty may be chance


@pytest.mark.parametrize("pairs", [([], []), ([1.0], [1.0, 0.0])])
def test_lists_that_are_no_pairs_are_refused(pairs):
    with pytest.raises(ValueError, match="the same number of scores"):
        compare_pairs([pairs])


def test_a_ratio_may_be_negative_where_scores_are():
    """Margins of a model that takes the other decisions; the interval is that of the mirrored scores."""
    baseline, value = [2.0, 3.0, 2.5, 3.5, 2.2], [1.0, 1.8, 1.1, 1.9, 1.2]
    plain = compare_pairs([(baseline, value)])
    mirrored = compare_pairs([(baseline, [-score for score in value])])
    assert mirrored.ratio == pytest.approx(-plain.ratio)
    assert mirrored.ratio_low == pytest.approx(-plain.ratio_high)
    assert mirrored.ratio_high == pytest.approx(-plain.ratio_low)
    around_zero = compare_pairs([(baseline, [0.5, -0.6, 0.2, -0.4, 0.1])])
    assert around_zero.ratio_low < 0 < around_zero.ratio_high
    lengths = compare_pairs([(baseline, [0.0, 0.1, 3.0, 0.0, 0.0])])  # which are never negative
    assert lengths.ratio_low == pytest.approx(0, abs=1e-9)
