"""Percentiles as defined, fits that recover what made the points."""

from __future__ import annotations

import math
import random

import pytest

from quantkit.results.statistics.paired import binomial_cdf, student_cdf, student_quantile
from quantkit.results.statistics.summary import fit_polynomial, least_squares, percentile, quantiles


def test_percentiles_interpolate_between_order_statistics():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert percentile([7.0], 99) == 7.0
    summary = quantiles([float(i) for i in range(101)])
    assert summary == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.0, "count": 101}
    assert quantiles([]) is None


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_what_has_no_percentile_is_refused(values, percent):
    with pytest.raises(ValueError, match="a percentile needs values"):
        percentile(values, percent)


def test_a_line_is_recovered_within_its_standard_errors():
    rng = random.Random(0)
    inside = [0, 0]
    for _ in range(500):
        x = [rng.uniform(100, 4000) for _ in range(60)]
        line = least_squares([(v, 0.02 + 1e-6 * v + rng.gauss(0, 1e-3)) for v in x], 1)
        for i, truth in enumerate((0.02, 1e-6)):
            inside[i] += abs(line.coefficients[i] - truth) <= 2.0 * line.standard_errors[i]
    assert all(abs(n / 500 - 0.95) < 0.03 for n in inside)


def test_stalls_are_left_out_and_counted():
    stalls = {50: 5, 190: 9}
    points = [(float(i), 1.0 + 0.01 * i + 0.001 * ((i * 7) % 11) + stalls.get(i, 0)) for i in range(200)]
    line = fit_polynomial(points)
    assert (line.num_points, line.num_dropped) == (198, 2)
    assert line.coefficients[1] == pytest.approx(0.01, rel=1e-2)
    assert least_squares(points, 1).coefficients[1] > 0.0105


def test_a_parabola_is_recovered():
    x = [128.0, 512.0, 1024.0, 2048.0, 4096.0]
    curve = fit_polynomial([(v, 0.01 + 1e-4 * v + 2e-9 * v * v) for v in x], degree=2)
    assert curve.coefficients == pytest.approx((0.01, 1e-4, 2e-9), rel=1e-6)
    assert curve.at(256.0) == pytest.approx(0.01 + 1e-4 * 256 + 2e-9 * 256**2)


@pytest.mark.parametrize("points", [[], [(1.0, 1.0), (2.0, 2.0)], [(3.0, 1.0)] * 9])
def test_too_few_points_have_no_fit(points):
    assert fit_polynomial(points) is None


# From tables of Student's distribution.
@pytest.mark.parametrize(
    ("probability", "freedom", "t"),
    [(0.975, 1, 12.7062), (0.975, 7, 2.364624), (0.95, 30, 1.697261), (0.995, 120, 2.617421), (0.025, 7, -2.364624)],
)
def test_student_s_distribution_is_that_of_the_tables(probability, freedom, t):
    assert student_quantile(probability, freedom) == pytest.approx(t, rel=1e-5)
    assert student_cdf(t, freedom) == pytest.approx(probability, abs=1e-6)


def test_with_infinite_freedom_student_is_normal_and_binomials_sum():
    assert student_quantile(0.975, math.inf) == pytest.approx(1.959964, rel=1e-6)
    assert binomial_cdf(2, 4) == pytest.approx(11 / 16)
    assert binomial_cdf(5000, 10000) == pytest.approx(0.504, abs=1e-3)
