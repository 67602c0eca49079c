"""Summaries of latencies: percentiles, medians with intervals, and straight-line or curved fits with standard errors.

A percentile here is the linear interpolation between order statistics (Hyndman and Fan's type 7, the default of NumPy):
for n sorted values, the p-th percentile lies at position (n - 1) p / 100, counted from 0. With fewer than 100 values
the 99th lies between the two largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.results import BenchmarkRun
from quantkit.results.statistics.distributions import binomial_pmf

OUTLIER_DEVIATIONS = 5.0  # residuals beyond this many robust deviations are stalls, not the cost of a step
NORMAL_PER_MAD = 1.4826  # standard deviation over median absolute deviation, for normal residuals


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated.

    Raises:
        ValueError: no values, or a percentage outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"a percentile needs values and 0 <= percent <= 100: {len(values)} values, {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Median and tails of one sample, and how many values it had."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """p50, p90, p99 and mean; None without values."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return Quantiles(p50=p50, p90=p90, p99=p99, mean=math.fsum(values) / len(values), count=len(values))


def median(values: Sequence[float]) -> float | None:
    """None without values."""
    return statistics.median(values) if values else None


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Median and its interval, from order statistics: no assumption but independent values.

    Returns:
        median, low, high; with too few values for the confidence (under 6 for 95 %), the extremes.
    """
    ordered = sorted(values)
    count = len(ordered)
    rank, below = 0, binomial_pmf(0, count) if count else 0.0  # below: chance that at most `rank` lie under the median
    while rank + 1 < (count + 1) // 2 and 2 * (below + binomial_pmf(rank + 1, count)) <= 1 - confidence:
        rank += 1
        below += binomial_pmf(rank, count)
    # The interval runs from the rank-th smallest to the rank-th largest, counted from 0.
    return statistics.median(ordered), ordered[rank], ordered[count - 1 - rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolynomialFit:
    """y = sum of coefficients[i] * x^i by least squares.

    Args:
        coefficients: constant first.
        standard_errors: one each.
        residual: standard deviation around the fit.
        num_points: used.
        num_dropped: stalls left out.
    """

    coefficients: tuple[float, ...]
    standard_errors: tuple[float, ...]
    residual: float
    num_points: int
    num_dropped: int

    def at(self, x: float) -> float:
        """The fitted value at `x`."""
        return math.fsum(c * x**i for i, c in enumerate(self.coefficients))


def fit_polynomial(
    x: Sequence[float], y: Sequence[float], *, degree: int = 1, drop_stalls: bool = True
) -> PolynomialFit | None:
    """Fit a polynomial, e.g. ITL = a + b * context (degree 1) or TTFT against prompt length (degree 2).

    Args:
        x, y: the points.
        degree: of the polynomial.
        drop_stalls: fit, leave out points above the fit by more than 5 robust deviations, fit again.
    Returns:
        None when there are too few points, or too few different x, to know the errors.
    """
    if len(x) != len(y) or len(x) < degree + 2 or len(set(x)) < degree + 1:
        return None
    first = _least_squares(x, y, degree)
    if not drop_stalls:
        return first
    residuals = [b - first.at(a) for a, b in zip(x, y, strict=True)]
    centre = statistics.median(residuals)
    spread = NORMAL_PER_MAD * statistics.median(abs(r - centre) for r in residuals)
    kept = [i for i, r in enumerate(residuals) if r - centre <= OUTLIER_DEVIATIONS * spread or spread == 0]
    chosen = [x[i] for i in kept]
    if len(kept) == len(x) or len(kept) < degree + 2 or len(set(chosen)) < degree + 1:
        return first
    return _least_squares(chosen, [y[i] for i in kept], degree, num_dropped=len(x) - len(kept))


def fit_gaps(run: BenchmarkRun) -> PolynomialFit | None:
    """ITL = a + b * context of one run, see `fit_polynomial`."""
    points = run.context_gaps
    return fit_polynomial([context for context, _ in points], [gap for _, gap in points])


def _least_squares(x: Sequence[float], y: Sequence[float], degree: int, *, num_dropped: int = 0) -> PolynomialFit:
    size, scale = degree + 1, max(abs(v) for v in x) or 1.0
    powers = [[(v / scale) ** i for i in range(size)] for v in x]  # scaled, so that the normal equations stay tame
    normal = [[math.fsum(row[i] * row[j] for row in powers) for j in range(size)] for i in range(size)]
    moment = [math.fsum(row[i] * value for row, value in zip(powers, y, strict=True)) for i in range(size)]
    inverse = _invert(normal)
    scaled = [math.fsum(inverse[i][j] * moment[j] for j in range(size)) for i in range(size)]
    squares = math.fsum(
        (value - math.fsum(c * p for c, p in zip(scaled, row, strict=True))) ** 2
        for row, value in zip(powers, y, strict=True)
    )
    variance = squares / (len(x) - size)
    return PolynomialFit(
        coefficients=tuple(c / scale**i for i, c in enumerate(scaled)),
        standard_errors=tuple(math.sqrt(variance * max(0.0, inverse[i][i])) / scale**i for i in range(size)),
        residual=math.sqrt(variance),
        num_points=len(x),
        num_dropped=num_dropped,
    )


def _invert(matrix: list[list[float]]) -> list[list[float]]:
    """Gauss and Jordan with row exchange; the matrices here are 2 x 2 or 3 x 3."""
    size = len(matrix)
    rows = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [v / rows[column][column] for v in rows[column]]
        for i in range(size):
            if i != column:
                factor = rows[i][column]
                rows[i] = [v - factor * p for v, p in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]
